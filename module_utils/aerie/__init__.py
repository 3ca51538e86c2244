# SPDX-License-Identifier: Apache-2.0
"""What Aerie exists for: patching, proving and releasing. Standard library only; runs on hosts too."""

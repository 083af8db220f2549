"""Whether a call is traced or transformed, so that a stored answer would end up where a computation is wanted.

`make_fx` and `torch.export` record what is done; `torch.func` and forward-mode AD carry along what no key tells apart;
of any other mode it is not known what it does to the operations that it sees, a FLOP counter's included, which is to
count the model's.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_is_within_mode: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_transformed: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
_n_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_function_modes: Callable[[], list[object]] = _get_current_function_mode_stack
_PLAIN = (Tensor, Parameter)


def is_traced() -> bool:
    """Whether a call must be computed for the sake of who is watching it. Takes a microsecond."""
    if _is_within_mode() or _is_transformed() is not None or forward_ad._current_level >= 0:
        return True
    # A default device changes nothing.
    return bool(_n_function_modes()) and not all(isinstance(mode, DeviceContext) for mode in _function_modes())


def are_strange(values: Iterable[Any]) -> bool:
    """Whether an argument is a tensor whose class may have a say in operations, or which a CUDA graph will replace."""
    return any(map(_is_strange, values))


def _is_strange(value: Any) -> bool:
    if type(value) in _PLAIN:
        return bool(value.is_cuda) and torch.cuda.is_current_stream_capturing()
    return isinstance(value, (Tensor, Proxy))

from tpkernels._C import calls as calls
from tpkernels._C import cuda as cuda
from tpkernels._C import host as host
from tpkernels._C import nccl as nccl

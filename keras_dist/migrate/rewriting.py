"""Rewriting the source of a script by the tables of `names`; the layout stays."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst.helpers import get_full_name_for_node, parse_template_expression
from libcst.metadata import MetadataWrapper, PositionProvider

from keras_dist import errors
from keras_dist.migrate.names import (
    GONE,
    GONE_MODULES,
    GPU_PINNING,
    HELD,
    IMPORTERS,
    MODULES,
    REMOVED_ARGUMENTS,
    UNKNOWN,
)

MARK = "\ufeff"  # the byte order mark of some editors, which LibCST drops
PINNED = "# keras_dist: init has selected the GPU of this rank; this line can be removed."
CHECKPOINTS = m.Name("ModelCheckpoint") | m.Name("BestModelCheckpoint")
CHECKPOINT = (
    "a checkpoint on rank 0 only: pass callbacks.ModelCheckpoint of keras_dist on every rank; it "
    "writes on rank 0, and a failure is raised on all ranks"
)
BARE_AVERAGE = "`average=` was replaced by `op=Average` or `op=Sum`"


@dataclasses.dataclass(frozen=True, order=True)
class Note:
    """A remark on a line, numbered from 1, that the user has to change."""

    line: int
    text: str


def rewrite(source: str, name: str) -> tuple[str, Sequence[Note]]:
    """Returns a script rewritten for keras_dist, and remarks; `name` is that in messages."""
    mark = MARK if source.startswith(MARK) else ""
    try:
        wrapper = MetadataWrapper(cst.parse_module(source.removeprefix(mark)))
    except cst.ParserSyntaxError as error:
        expected, received = "a script in Python 3", f"{error.message} in line {error.raw_line}"
        remedy = "Correct it first; 2to3 and pyupgrade convert Python 2."
        raise errors.ArgumentError(f"[{name}]", expected, received, remedy) from None
    rewriter = _Rewriter()
    changed = wrapper.visit(rewriter)
    return mark + changed.code, sorted(set(rewriter.notes))


class _Rewriter(m.MatcherDecoratableTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Note] = []
        self._aliases: set[str] = set()  # the name of Horovod in the script
        self._binds_package = False  # an import without `as` binds the name `horovod`
        self._left: set[str] = set()  # modules that the script imports as before, without `as`

    # --- Imports

    def visit_Import(self, node: cst.Import) -> None:
        for alias in node.names:
            name = get_full_name_for_node(alias.name) or ""
            if _is_horovods(name):
                bound, module = alias.evaluated_alias or name, _new_module(name)[0]
                self._aliases |= {bound, module or bound}
                if alias.asname is None:
                    self._binds_package |= module is not None
                    self._left |= {name} if module is None else set()

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        module = _module_of(node)
        if not _is_horovods(module) or isinstance(node.names, cst.ImportStar):
            return
        for alias in node.names:
            name = get_full_name_for_node(alias.name) or ""
            if f"{module}.{name}" in MODULES:
                self._aliases.add(alias.evaluated_alias or name)
            elif name in GONE:
                self._add_note(node, f"{name}: {GONE[name]}")

    def leave_Import(self, node: cst.Import, updated: cst.Import) -> cst.Import:
        names = []
        for alias, new in zip(node.names, updated.names, strict=True):
            name = get_full_name_for_node(alias.name) or ""
            module, trouble = _new_module(name)
            if trouble is not None:
                self._add_note(node, trouble)
            names.append(new if module is None else new.with_changes(name=_dotted(module)))
        return updated.with_changes(names=names)

    def leave_ImportFrom(
        self, node: cst.ImportFrom, updated: cst.ImportFrom
    ) -> cst.ImportFrom | cst.Import | cst.FlattenSentinel[cst.BaseSmallStatement]:
        old = _module_of(node)
        module, trouble = _new_module(old)
        if isinstance(updated.names, cst.ImportStar) or not _is_horovods(old):
            aliases: Sequence[cst.ImportAlias] = []
        else:
            aliases = updated.names
        inner = [f"{old}.{get_full_name_for_node(alias.name)}" for alias in aliases]
        troubles = [_reason_without_replacement(name) for name in inner]
        if trouble is not None and all(name in MODULES for name in inner) and inner:
            trouble = None  # `from horovod.common import exceptions`
        if trouble is not None or any(troubles):
            self._add_note(node, next(filter(None, (*troubles, trouble))))
            return updated
        # `from horovod.tensorflow import keras as hvd`: modules that have other names now.
        modules = {
            name: alias for name, alias in zip(inner, aliases, strict=True) if name in MODULES
        }
        names = [alias for alias in aliases if alias not in modules.values()]
        if not modules:
            return updated if module is None else updated.with_changes(module=_dotted(module))
        imports: list[Any] = [
            cst.Import([cst.ImportAlias(_dotted(MODULES[name]), _named(alias))])
            for name, alias in modules.items()
        ]
        if names:
            names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            imports.append(updated.with_changes(module=_dotted(module or ""), names=names))
        return imports[0] if len(imports) == 1 else cst.FlattenSentinel(imports)

    # --- Names, in the code that follows

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        return get_full_name_for_node(node) not in self._left

    def leave_Attribute(self, node: cst.Attribute, updated: cst.Attribute) -> cst.BaseExpression:
        name = get_full_name_for_node(node) or ""
        holder, _, attribute = name.rpartition(".")
        if attribute in GONE and holder in self._aliases:
            self._add_note(node, f"{name}: {GONE[attribute]}")
        # `import horovod.torch` without a name of its own.
        if name in MODULES and name in self._aliases:
            return _dotted(MODULES[name])
        is_left = any(f"{left}.".startswith(f"{name}.") for left in self._left)
        if holder == "horovod" and self._binds_package and name not in GONE_MODULES and not is_left:
            return updated.with_changes(value=cst.Name("keras_dist"))
        return updated

    def visit_Call(self, node: cst.Call) -> None:
        function = (get_full_name_for_node(node.func) or "").rpartition(".")[2]
        text = node.args[0].value if node.args else None
        if function not in IMPORTERS or not isinstance(text, cst.SimpleString):
            return
        name = str(text.evaluated_value)
        if _is_horovods(name):
            module, trouble = _new_module(name)
            self._add_note(node, trouble or f"{function}: {name} is called {module} now")

    def leave_Call(self, node: cst.Call, updated: cst.Call) -> cst.Call:
        name = get_full_name_for_node(node.func) or ""
        holder, _, function = name.rpartition(".")
        args = list(updated.args)
        if function == "broadcast_variables":
            # Of an optimizer they were a method in Keras 2, and are a property in Keras 3.
            args = [_without_call(arg) for arg in args]
        if (removed := REMOVED_ARGUMENTS.get(function)) and holder:
            args = [arg for arg in args if not _is_named(arg, removed)]
        # Others have an argument of this name too, such as torch.nn.GroupNorm.
        groups = next((arg for arg in args if _is_named(arg, "num_groups")), None)
        if groups is not None and holder in self._aliases:
            args[args.index(groups)] = groups.with_changes(keyword=cst.Name("groups"))
        if function in ("allreduce", "allreduce_", "allreduce_async", "allreduce_async_"):
            averaged = next((arg for arg in args if _is_named(arg, "average")), None)
            if averaged is not None and holder in self._aliases:
                args[args.index(averaged)] = _as_op(
                    averaged, _dotted(_new_module(holder)[0] or holder)
                )
            elif averaged is not None and not holder:
                self._add_note(node, BARE_AVERAGE)
        if len(args) < len(updated.args) and args:
            args[-1] = args[-1].with_changes(comma=updated.args[-1].comma)
        return updated.with_changes(args=args)

    # --- Statements

    def leave_SimpleStatementLine(
        self, node: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        names = {get_full_name_for_node(attribute) for attribute in _attributes(node)}
        ends = {name.rpartition(".")[2] for name in names if name}
        pins = any(f"{alias}.local_rank" in names for alias in self._aliases)
        told = any(line.comment and line.comment.value == PINNED for line in node.leading_lines)
        if not pins or told or not ends & set(GPU_PINNING):
            return updated
        comment = cst.EmptyLine(comment=cst.Comment(PINNED))
        return updated.with_changes(leading_lines=[*updated.leading_lines, comment])

    def visit_If(self, node: cst.If) -> None:
        asked = {get_full_name_for_node(attribute) for attribute in _attributes(node.test)}
        of_rank = any(f"{alias}.rank" in asked for alias in self._aliases)
        if of_rank and m.findall(node.body, CHECKPOINTS):
            self._add_note(node, CHECKPOINT)

    def _add_note(self, node: cst.CSTNode, text: str) -> None:
        line = self.get_metadata(PositionProvider, node).start.line
        self.notes.append(Note(line, text))


def _is_horovods(name: str) -> bool:
    return name.partition(".")[0] == "horovod"


def _module_of(node: cst.ImportFrom) -> str:
    absolute = not node.relative and node.module is not None
    return (get_full_name_for_node(node.module) or "") if absolute and node.module else ""


def _new_module(name: str) -> tuple[str | None, str | None]:
    """Returns the new name of a module of Horovod, or the reason why there is none."""
    if not _is_horovods(name):
        return None, None
    gone = next(
        (text for old, text in GONE_MODULES.items() if f"{name}.".startswith(f"{old}.")), None
    )
    if gone is not None:
        return None, gone
    return (MODULES[name], None) if name in MODULES else (None, UNKNOWN)


def _reason_without_replacement(name: str) -> str | None:
    """Returns the reason why a dotted name of Horovod has no replacement, if known."""
    if name in GONE_MODULES:
        return GONE_MODULES[name]
    package, _, member = name.rpartition(".")
    known = member in HELD.get(package, {member}) or name in MODULES
    return None if known else UNKNOWN


def _named(alias: cst.ImportAlias) -> cst.AsName:
    """Returns the `as` clause that keeps the name used in the script."""
    space = cst.SimpleWhitespace(" ")
    return alias.asname or cst.AsName(cst.Name(alias.evaluated_name), space, space)


def _dotted(name: str) -> Any:
    return parse_template_expression(name)


def _attributes(node: cst.CSTNode) -> Sequence[Any]:
    return m.findall(node, m.Attribute())


def _is_named(arg: cst.Arg, name: str) -> bool:
    return arg.keyword is not None and arg.keyword.value == name


def _without_call(arg: cst.Arg) -> cst.Arg:
    """Turns `optimizer.variables()` into `optimizer.variables`."""
    call, variables = arg.value, m.Attribute(attr=m.Name("variables"))
    if isinstance(call, cst.Call) and not call.args and m.matches(call.func, variables):
        return arg.with_changes(value=call.func)
    return arg


def _as_op(arg: cst.Arg, holder: cst.BaseExpression) -> cst.Arg:
    """Turns `average=True` into `op=hvd.Average`, also for values known only at run time."""
    both = [cst.Attribute(holder, cst.Name(name)) for name in ("Average", "Sum")]
    if m.matches(arg.value, m.Name("True") | m.Name("False")):
        op: cst.BaseExpression = both[0 if m.matches(arg.value, m.Name("True")) else 1]
    else:
        op = cst.IfExp(test=arg.value, body=both[0], orelse=both[1])
    return arg.with_changes(keyword=cst.Name("op"), value=op)

"""
Mutants of a source file: every small fault of a fixed list, as the text of a module.

Not mutated, because no behaviour is in them: docstrings, annotations and type aliases, imports, decorators, `raise`
statements (what is raised and its message; the conditions before them are mutated) and f-strings.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
METHODS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
CASTS = ("detach", "bool", "long")


@dataclass(frozen=True)
class Mutant:
    """A module with one fault; `in_function` says whether the fault is in the body or signature of a function."""

    module: str
    line: int
    kind: str
    before: str
    after: str
    code: str
    in_function: bool

    @property
    def key(self) -> str:
        return hashlib.sha1(f"{self.module}\n{self.code}".encode()).hexdigest()[:16]


def changed(node: ast.AST, **fields) -> ast.AST:
    """Copy of a node with other fields."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def without(items: list, index: int, *new) -> list:
    """The list with one item removed or replaced."""
    return [*items[:index], *new, *items[index + 1 :]]


def changed_value(value: object) -> object:
    """Another constant of the same type; `None` for those that stay."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 if value else 1.0
    return value + "XX" if isinstance(value, str) else None


def call_faults(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    for index, keyword in enumerate(node.keywords):
        # Every tensor of the tests is on one device.
        if keyword.arg not in (None, "device"):
            yield "keyword dropped", changed(node, keywords=without(node.keywords, index))
    if isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name in METHODS:
            yield "function", changed(node, func=changed(node.func, attr=METHODS[name]))
        if name in CASTS and not node.args:
            yield "call dropped", node.func.value
        if name == "where" and len(node.args) == 3:
            yield "where", changed(node, args=[node.args[0], node.args[2], node.args[1]])


def faults(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Kind and replacement of every fault of one node."""
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                for new in COMPARISONS[type(operator)]:
                    yield "comparison", changed(node, ops=without(node.ops, index, new()))
        case ast.BinOp() | ast.AugAssign() if type(node.op) in ARITHMETIC:
            yield "arithmetic", changed(node, op=ARITHMETIC[type(node.op)]())
        case ast.BoolOp():
            yield "boolean", changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp():
            yield "unary", node.operand
        case ast.Constant() if changed_value(node.value) is not None:
            yield "constant", changed(node, value=changed_value(node.value))
        case ast.IfExp():
            yield "branches", changed(node, body=node.orelse, orelse=node.body)
        case ast.If() | ast.While():
            yield "condition", changed(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.comprehension():
            for index, test in enumerate(node.ifs):
                yield "condition", changed(node, ifs=without(node.ifs, index, ast.UnaryOp(ast.Not(), test)))
        case ast.Expr(value=ast.Call()) | ast.Continue() | ast.Break():
            yield "statement dropped", ast.Pass()
        case ast.Return() if node.value is not None:
            yield "result dropped", changed(node, value=ast.Constant(None))
        case ast.Call():
            yield from call_faults(node)


def is_left_alone(node: ast.AST, field: str) -> bool:
    if field in ("annotation", "returns", "decorator_list"):
        return True
    match node:
        case ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(value=ast.Subscript(value=ast.Name(id="Literal" | "tuple"))):
            return True
    return False


def places(node: ast.AST, in_function: bool = False) -> Iterator[tuple[object, object, ast.AST, bool]]:
    """Container, key and node of everything that may be mutated: `container[key] = other` exchanges the node."""
    for field, value in ast.iter_fields(node):
        slots = [(value, i, item) for i, item in enumerate(value)] if isinstance(value, list) else []
        for container, key, item in slots or [(vars(node), field, value)]:
            if isinstance(item, ast.AST) and not is_left_alone(item, field):
                yield container, key, item, in_function
                yield from places(item, in_function or isinstance(item, ast.FunctionDef))


def find_mutants(module: str, source: str) -> list[Mutant]:
    """Every mutant of a source text, each once."""
    tree = ast.parse(source)
    found = {ast.unparse(tree): None}
    for container, key, node, in_function in list(places(tree)):
        for kind, new in faults(node):
            container[key] = new
            code = ast.unparse(tree)
            container[key] = node
            texts = [ast.unparse(n).strip().splitlines()[0][:120] for n in (node, new)]
            line = getattr(node, "lineno", None) or node.target.lineno
            found.setdefault(code, Mutant(module, line, kind, *texts, code, in_function))
    return [mutant for mutant in found.values() if mutant]

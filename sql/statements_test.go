package statements

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strconv"
	"testing"
)

// Each file has one name, and each name a file: a name that is misspelt would panic where
// it is first sent, and a file without a name is dead.
func TestEachNameHasAFileAndEachFileAName(t *testing.T) {
	t.Parallel()
	parsed, err := parser.ParseFile(token.NewFileSet(), "names.go", nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	named := make(map[Name]bool)
	ast.Inspect(parsed, func(n ast.Node) bool {
		if literal, ok := n.(*ast.BasicLit); ok && literal.Kind == token.STRING {
			name, err := strconv.Unquote(literal.Value)
			if err != nil {
				t.Fatal(err)
			}
			if named[Name(name)] {
				t.Errorf("%q has two names", name)
			}
			named[Name(name)] = true
		}
		return true
	})
	if len(named) < 50 {
		t.Errorf("only %d names were found", len(named))
	}
	for name := range named {
		if _, found := texts()[name]; !found {
			t.Errorf("there is no sql/%s.sql", name)
		}
	}
	for name := range texts() {
		if !named[name] {
			t.Errorf("sql/%s.sql has no name", name)
		}
	}
}

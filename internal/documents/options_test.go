package documents

import (
	"fmt"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// rootPackage returns the root package as the compiler sees it.
func rootPackage(t *testing.T) *types.Package {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", ".")
	list.Stderr = os.Stderr
	listed, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	compiled := make(map[string]string)
	for line := range strings.Lines(string(listed)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		compiled[path] = file
	}
	lookup := func(path string) (io.ReadCloser, error) { return os.Open(compiled[path]) }
	root, err := importer.ForCompiler(token.NewFileSet(), "gc", lookup).Import("github.com/pgxlock/pgxlock")
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// optionCalls returns the exported calls of a package that take options, by the type of these.
func optionCalls(root *types.Package) (of map[types.Type][]string) {
	of = make(map[types.Type][]string)
	add := func(name string, call *types.Func) {
		if s := call.Signature(); call.Exported() && s.Variadic() {
			taken := s.Params().At(s.Params().Len() - 1).Type().(*types.Slice).Elem()
			of[taken] = append(of[taken], name)
		}
	}
	for _, name := range root.Scope().Names() {
		switch o := root.Scope().Lookup(name).(type) {
		case *types.Func:
			add(name, o)
		case *types.TypeName:
			if receiver, ok := o.Type().(*types.Named); ok && o.Exported() {
				for call := range receiver.Methods() {
					add(name+"."+call.Name(), call)
				}
			}
		}
	}
	return of
}

// optionTypes returns the exported types of a package that are options.
func optionTypes(root *types.Package) (options []*types.TypeName) {
	for _, name := range root.Scope().Names() {
		o, ok := root.Scope().Lookup(name).(*types.TypeName)
		if ok && o.Exported() && !types.IsInterface(o.Type()) && types.NewMethodSet(o.Type()).Lookup(root, "apply") != nil {
			options = append(options, o)
		}
	}
	return options
}

// A call compiles with those options that the matrix has for it, and with no other.
func TestMatrixOfCallsAndOptionsIsWhatCompiles(t *testing.T) {
	pgtest.Builds(t)
	t.Parallel()
	root := rootPackage(t)
	options := optionTypes(root)
	var rows []string
	for taken, calls := range optionCalls(root) {
		slices.Sort(calls)
		row := fmt.Sprintf("| `%s` | `%s` |", strings.Join(calls, "`, `"), types.TypeString(taken, types.RelativeTo(root)))
		for _, option := range options {
			if types.AssignableTo(option.Type(), taken) {
				row += " yes |"
			} else {
				row += " |"
			}
		}
		rows = append(rows, row+"\n")
	}
	slices.Sort(rows)
	matrix := "| calls | take |"
	for _, option := range options {
		matrix += " `" + option.Name() + "` |"
	}
	matrix += "\n|---|---|" + strings.Repeat(":-:|", len(options)) + "\n" + strings.Join(rows, "")
	t.Logf("calls and options:\n%s", matrix)

	const page = "docs/options.md"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), "\n"+matrix+"\n") {
		t.Errorf("%s has another matrix", page)
	}
}

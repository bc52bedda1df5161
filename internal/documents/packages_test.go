package documents

import (
	"encoding/json"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// packages returns which packages of the library and of the command import which, by their
// names. What only the command imports is part of it.
func packages(t *testing.T) map[string][]string {
	t.Helper()
	const module, command = "github.com/pgxlock/pgxlock", "command"
	name := func(importPath string) string {
		if strings.HasPrefix(importPath, module+"/cmd/pgxlock") {
			return command
		}
		return path.Base(importPath)
	}
	imports := make(map[string][]string)
	named := []string{command, "pgxlock"} // a program may import them
	for _, dir := range []string{".", "cmd/pgxlock", "adapters/prometheus"} {
		cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports,GoFiles", "./...")
		cmd.Dir = dir
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("go list in %s: %v", dir, err)
		}
		for decoder := json.NewDecoder(strings.NewReader(string(out))); decoder.More(); {
			var p struct {
				ImportPath       string
				Imports, GoFiles []string
			}
			if err := decoder.Decode(&p); err != nil {
				t.Fatal(err)
			}
			below := strings.TrimPrefix(p.ImportPath, module+"/")
			if len(p.GoFiles) == 0 || strings.HasPrefix(below, "examples/") || below == "locktesting" {
				continue
			}
			from := name(p.ImportPath)
			if !strings.Contains(below, "internal/") {
				named = append(named, from)
			}
			for _, to := range p.Imports {
				if to == module || strings.HasPrefix(to, module+"/") && name(to) != from {
					imports[from] = append(imports[from], name(to))
				}
			}
		}
	}
	reached := make(map[string][]string)
	for len(named) > 0 {
		from := named[0]
		named = named[1:]
		if _, done := reached[from]; !done {
			slices.Sort(imports[from])
			reached[from] = slices.Compact(imports[from])
			named = append(named, imports[from]...)
		}
	}
	return reached
}

// leads reports whether a package imports another one, or packages that lead to it.
func leads(imports map[string][]string, from, to string) bool {
	return from == to || slices.ContainsFunc(imports[from], func(next string) bool { return leads(imports, next, to) })
}

func TestDesignDrawsEachImportThatOthersDoNotLeadTo(t *testing.T) {
	pgtest.Builds(t)
	t.Parallel()
	text, err := os.ReadFile("docs/design.md")
	if err != nil {
		t.Fatal(err)
	}
	_, drawing, _ := strings.Cut(string(text), "flowchart TD\n")
	drawing, _, _ = strings.Cut(drawing, "```")
	drawn := make(map[string]bool)
	for line := range strings.Lines(drawing) {
		ends := strings.Split(strings.TrimSpace(line), " --> ")
		for i := range len(ends) - 1 {
			for from := range strings.SplitSeq(ends[i], " & ") {
				for to := range strings.SplitSeq(ends[i+1], " & ") {
					drawn[from+" --> "+to] = true
				}
			}
		}
	}
	imports := packages(t)
	for from, all := range imports {
		for _, to := range all {
			arrow := from + " --> " + to
			implied := slices.ContainsFunc(all, func(other string) bool { return other != to && leads(imports, other, to) })
			if !implied && !drawn[arrow] {
				t.Errorf("docs/design.md does not draw %s", arrow)
			}
			if !implied {
				delete(drawn, arrow)
			}
		}
	}
	for arrow := range drawn {
		t.Errorf("docs/design.md draws %s, which is no import, or is implied", arrow)
	}
}

package documents

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// dependencies returns the packages outside the standard library that the package of a directory
// links, or those of the standard library.
func dependencies(t *testing.T, dir string, standard bool) []string {
	t.Helper()
	format := "{{if not .Standard}}{{.ImportPath}}{{end}}"
	if standard {
		format = "{{if .Standard}}{{.ImportPath}}{{end}}"
	}
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", format, ".")
	cmd.Dir = dir
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, said.String())
	}
	all := strings.Fields(string(out))
	if len(all) == 0 {
		t.Fatalf("%s depends on nothing at all", dir)
	}
	return all
}

func TestProgramThatOnlyLocksLinksPgxAndNothingElse(t *testing.T) {
	pgtest.Builds(t)
	t.Parallel()
	for _, dep := range dependencies(t, ".", false) {
		if dep != "github.com/pgxlock/pgxlock" && dep != "github.com/pgxlock/pgxlock/sql" && !strings.HasPrefix(dep, "github.com/pgxlock/pgxlock/internal/") &&
			!strings.HasPrefix(dep, "github.com/jackc/") && !strings.HasPrefix(dep, "golang.org/x/") {
			t.Errorf("it links %s", dep)
		}
	}
	for _, dep := range dependencies(t, ".", true) {
		if dep == "testing" || strings.HasPrefix(dep, "testing/") || dep == "net/http" {
			t.Errorf("it links %s", dep)
		}
	}
}

// What the module of the library requires, all its importers list. What anything else needs is
// required by a module of its own.
func TestRootModuleRequiresPgxAndWhatItsTestsNeed(t *testing.T) {
	pgtest.Builds(t)
	t.Parallel()
	required := []string{
		"github.com/jackc/pgerrcode", "github.com/jackc/pgx/v5", "golang.org/x/sys", // the library
		"go.uber.org/goleak", "pgregory.net/rapid", // its tests
		"github.com/jackc/pgpassfile", "github.com/jackc/pgservicefile", "github.com/jackc/puddle/v2", "golang.org/x/sync", "golang.org/x/text", // pgx
	}
	var got []string
	for _, r := range readModule(t, ".").Require {
		got = append(got, r.Path)
	}
	slices.Sort(got)
	slices.Sort(required)
	if !slices.Equal(got, required) {
		t.Errorf("go.mod requires\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(required, "\n"))
	}
}

func TestCommandLinksNoDockerClientAndNoTestFramework(t *testing.T) {
	pgtest.Builds(t)
	t.Parallel()
	for _, dep := range append(dependencies(t, "./cmd/pgxlock", false), dependencies(t, "./cmd/pgxlock", true)...) {
		for _, unwanted := range []string{"docker", "moby", "testcontainers", "containerd", "internal/pgtest", "internal/pgserver", "goleak"} {
			if strings.Contains(dep, unwanted) {
				t.Errorf("it links %s", dep)
			}
		}
		if dep == "testing" || strings.HasPrefix(dep, "testing/") {
			t.Errorf("it links %s", dep)
		}
	}
}

// A module is what go.mod says.
type module struct {
	Require []struct{ Path, Version string }
	Replace []struct{ Old, New struct{ Path string } }
	Exclude []any
}

func readModule(t *testing.T, dir string) (m module) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "mod", "edit", "-json", filepath.Join(dir, "go.mod")).Output()
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(out, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

// go install pgxlock@latest refuses a module that replaces or excludes others. scripts/release
// takes out what the released modules replace: each other, by the directory in the repository.
func TestReleasedModulesReplaceEachOtherOnly(t *testing.T) {
	pgtest.Builds(t)
	t.Parallel()
	script, err := os.ReadFile("scripts/release")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(script), "\nmodules=(")
	list, _, _ = strings.Cut(list, ")")
	released := strings.Fields(list)
	if len(released) == 0 {
		t.Fatal("scripts/release releases no nested module")
	}
	if m := readModule(t, "."); len(m.Replace)+len(m.Exclude) > 0 {
		t.Errorf("go.mod replaces %v and excludes %v", m.Replace, m.Exclude)
	}
	before := []string{modulePath}
	for _, dir := range released {
		m := readModule(t, dir)
		if len(m.Exclude) > 0 {
			t.Errorf("%s excludes %v", dir, m.Exclude)
		}
		var replaced, ours []string
		for _, r := range m.Replace {
			replaced = append(replaced, r.Old.Path)
			if !slices.Contains(before, r.Old.Path) {
				t.Errorf("%s replaces %s, which is no module that scripts/release tags before it", dir, r.Old.Path)
			}
		}
		for _, r := range m.Require {
			if r.Path == modulePath || strings.HasPrefix(r.Path, modulePath+"/") {
				ours = append(ours, r.Path)
			}
		}
		slices.Sort(replaced)
		slices.Sort(ours)
		if !slices.Equal(replaced, ours) {
			t.Errorf("%s requires %v of ours, and replaces %v", dir, ours, replaced)
		}
		before = append(before, modulePath+"/"+dir)
	}
}

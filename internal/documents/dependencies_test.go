package documents

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
)

// dependencies returns the packages outside the standard library that a package
// links, or those of the standard library.
func dependencies(t *testing.T, pkg string, standard bool) []string {
	t.Helper()
	format := "{{if not .Standard}}{{.ImportPath}}{{end}}"
	if standard {
		format = "{{if .Standard}}{{.ImportPath}}{{end}}"
	}
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", format, pkg)
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, said.String())
	}
	all := strings.Fields(string(out))
	if len(all) == 0 {
		t.Fatalf("%s depends on nothing at all", pkg)
	}
	return all
}

func TestAProgramThatOnlyLocksLinksPgxAndNothingElse(t *testing.T) {
	builds(t)
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

// Prometheus is a requirement of the module for the command alone.
func TestNoPublicPackageLinksPrometheus(t *testing.T) {
	builds(t)
	t.Parallel()
	for _, pkg := range []string{".", "./once", "./ratelimit", "./doctor", "./migrations", "./adapters/health"} {
		for _, dep := range dependencies(t, pkg, false) {
			if strings.Contains(dep, "prometheus") || dep == "github.com/pgxlock/pgxlock/internal/metrics" {
				t.Errorf("%s links %s", pkg, dep)
			}
		}
	}
}

func TestTheCommandLinksNoDockerClientAndNoTestFramework(t *testing.T) {
	builds(t)
	t.Parallel()
	for _, dep := range append(dependencies(t, "./cmd/pgxlock", false), dependencies(t, "./cmd/pgxlock", true)...) {
		for _, unwanted := range []string{"docker", "moby", "testcontainers", "containerd", "internal/pgtest", "goleak"} {
			if strings.Contains(dep, unwanted) {
				t.Errorf("it links %s", dep)
			}
		}
		if dep == "testing" || strings.HasPrefix(dep, "testing/") {
			t.Errorf("it links %s", dep)
		}
	}
}

// go install pgxlock@latest refuses a module that replaces or excludes others.
func TestTheModuleCanBeInstalledFromElsewhere(t *testing.T) {
	builds(t)
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), "go", "mod", "edit", "-json")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var module struct{ Replace, Exclude []any }
	if err := json.Unmarshal(out, &module); err != nil {
		t.Fatal(err)
	}
	if len(module.Replace)+len(module.Exclude) > 0 {
		t.Errorf("go.mod replaces %v and excludes %v", module.Replace, module.Exclude)
	}
}

package documents

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// A release is what others get of the tags of this tree: a proxy of Go modules in a directory.
type release struct {
	dir string // for all that belongs to it
	env []string
}

const (
	releaseVersion = "v0.99.0"
	modulePath     = "github.com/pgxlock/pgxlock"
)

// newRelease copies the tree into a repository of its own, and releases it there by a program
// that makes tags.
func newRelease(t *testing.T, program string, arg ...string) release {
	t.Helper()
	pgtest.Builds(t)
	r := release{dir: t.TempDir()}
	tree := filepath.Join(r.dir, "tree")
	files, err := exec.CommandContext(t.Context(), "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	for name := range strings.SplitSeq(strings.TrimRight(string(files), "\x00"), "\x00") {
		info, err := os.Stat(name)
		if os.IsNotExist(err) { // deleted, and not committed yet
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(tree, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(tree, name), text, info.Mode()); err != nil {
			t.Fatal(err)
		}
	}
	// Nothing of the user's configuration, such as signed tags.
	r.env = append(os.Environ(), "GIT_CONFIG_GLOBAL="+os.DevNull, "GIT_CONFIG_NOSYSTEM=1", "GOFLAGS=-modcacherw", "GOWORK=off", "GOSUMDB=off", "GONOPROXY=none", "CGO_ENABLED=0")
	for _, who := range []string{"AUTHOR", "COMMITTER"} {
		r.env = append(r.env, "GIT_"+who+"_NAME=a maintainer", "GIT_"+who+"_EMAIL=maintainer@example.com")
	}
	proxy := "file://" + filepath.Join(r.run(t, tree, "go", "env", "GOMODCACHE"), "cache/download") + "," + r.run(t, tree, "go", "env", "GOPROXY")
	r.run(t, tree, "git", "init", "-q")
	r.run(t, tree, "git", "add", "-A")
	r.run(t, tree, "git", "commit", "-q", "-m", "A tree to release")
	r.run(t, tree, program, append(arg, releaseVersion)...)

	tags := strings.Fields(r.run(t, tree, "git", "tag"))
	cache := filepath.Join(r.dir, "published")
	from := release{r.dir, append(r.env, "GOPROXY=direct", "GOMODCACHE="+cache, "GIT_CONFIG_COUNT=1",
		"GIT_CONFIG_KEY_0=url.file://"+tree+".insteadOf", "GIT_CONFIG_VALUE_0=https://"+modulePath)}
	for _, tag := range tags {
		from.run(t, r.dir, "go", "mod", "download", strings.TrimSuffix(modulePath+"/"+strings.TrimSuffix(tag, releaseVersion), "/")+"@"+releaseVersion)
	}
	r.env = append(r.env, "GOMODCACHE="+filepath.Join(r.dir, "modules"), "GOBIN="+filepath.Join(r.dir, "bin"),
		"GOPROXY=file://"+filepath.Join(cache, "cache/download")+","+proxy)
	return r
}

// run runs a program in a directory, and returns what it wrote.
func (r release) run(t *testing.T, dir, name string, arg ...string) string {
	t.Helper()
	if strings.Contains(name, "/") {
		name = filepath.Join(dir, name)
	}
	cmd := exec.CommandContext(t.Context(), name, arg...)
	cmd.Dir, cmd.Env = dir, r.env
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(arg, " "), err, &out, &said)
	}
	return strings.TrimSpace(out.String())
}

// newModule makes a module of somebody else's.
func (r release) newModule(t *testing.T, source string) (dir string) {
	t.Helper()
	dir = filepath.Join(r.dir, "theirs")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"go.mod": "module example.com/theirs\n\ngo 1.26.0\n", "main.go": source} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestReleaseInstallsTheCommandFromItsTags(t *testing.T) {
	t.Parallel()
	r := newRelease(t, "scripts/release")
	dir := r.newModule(t, "package theirs\n")
	r.run(t, dir, "go", "install", "-trimpath", modulePath+"/cmd/pgxlock@"+releaseVersion)
	if got := r.run(t, dir, filepath.Join("../bin", "pgxlock"), "version"); got != "pgxlock "+releaseVersion {
		t.Errorf("the command says that it is %q", got)
	}
}

// What a program takes upon itself that locks and installs the schema: goproxy, vulnerability
// scanners and minimal version selection see all of these modules, linked or not.
func TestImporterListsFewModules(t *testing.T) {
	t.Parallel()
	r := newRelease(t, "git", "tag")
	dir := r.newModule(t, `package theirs

import (
	_ "`+modulePath+`"
	_ "`+modulePath+`/migrations"
)
`)
	r.run(t, dir, "go", "get", modulePath+"@"+releaseVersion)
	r.run(t, dir, "go", "mod", "tidy")
	modules := strings.Split(r.run(t, dir, "go", "list", "-m", "all"), "\n")
	sums, err := os.ReadFile(filepath.Join(dir, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	const mostModules, mostSums = 21, 34 // with the importer and pgxlock; without pgxlock's own lines
	if lines := bytes.Count(sums, []byte("\n")) - bytes.Count(sums, []byte(modulePath)); len(modules) > mostModules || lines > mostSums {
		t.Errorf("%d modules and %d lines of go.sum, want at most %d and %d:\n%s\n%s", len(modules), lines, mostModules, mostSums, strings.Join(modules, "\n"), sums)
	}
}

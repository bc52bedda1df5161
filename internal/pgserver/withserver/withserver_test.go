package withserver

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/leaktest"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgserver/choose"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var tests = program{names: forTests}

// haveServer makes the choice fall on a server that runs already, and returns its connection string.
func haveServer(t *testing.T) (url string) {
	t.Helper()
	url = os.Getenv(choose.DatabaseEnv) // of a run of make test
	if url == "" {
		s, err := pgserver.Start(t.Context(), pgserver.Config{Settings: choose.Settings()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := s.Stop(context.Background()); err != nil {
				t.Error(err)
			}
		})
		url = s.URL("postgres")
	}
	t.Setenv(choose.DatabaseEnv, url)
	t.Setenv(choose.ServerEnv, "the one on the shelf")
	return url
}

func TestCommandLearnsOfTheServer(t *testing.T) {
	url := haveServer(t)
	out := filepath.Join(t.TempDir(), "out")
	script := `printf '%s\n' "$PGXLOCK_TEST_DATABASE" "$PGXLOCK_TEST_SERVER" > "$1"`
	if code := tests.with([]string{"sh", "-c", script, "sh", out}); code != 0 {
		t.Errorf("code %d", code)
	}
	got, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	if want := url + "\nthe one on the shelf\n"; string(got) != want {
		t.Errorf("the command got %q, want %q", got, want)
	}
}

func TestCommandCopiesClustersThatAreRemovedAfterIt(t *testing.T) {
	haveServer(t)
	t.Setenv(pgserver.ClustersEnv, "") // no program around this one shares any
	out := filepath.Join(t.TempDir(), "out")
	if code := tests.with([]string{"sh", "-c", `[ -d "$PGXLOCK_TEST_CLUSTERS" ] && printf %s "$PGXLOCK_TEST_CLUSTERS" > "$1"`, "sh", out}); code != 0 {
		t.Errorf("code %d", code)
	}
	dir, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(string(dir)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is left: %v", dir, err)
	}
}

func TestCodeIsTheCommands(t *testing.T) {
	haveServer(t)
	for command, want := range map[string]int{
		"sh -c true":                 0,
		"sh -c false":                1,
		"sh -c exit${IFS}7":          7,
		"sh -c kill${IFS}-9${IFS}$$": exitSignal + 9,
		"no-such-command":            exitNotFound,
		"sh -c kill${IFS}-15${IFS}$PPID;exec${IFS}sleep${IFS}60": exitSignal + 15, // ours, passed on
	} {
		if got := tests.with(strings.Fields(command)); got != want {
			t.Errorf("%s: code %d, want %d", command, got, want)
		}
	}
}

func TestWithoutAServerTheCommandDoesNotRun(t *testing.T) {
	t.Setenv(choose.DatabaseEnv, "postgres:///postgres?host="+t.TempDir())
	out := filepath.Join(t.TempDir(), "out")
	if code := tests.with([]string{"touch", out}); code != exitNoServer {
		t.Errorf("code %d, want %d", code, exitNoServer)
	}
	if _, err := os.Stat(out); err == nil {
		t.Error("the command ran")
	}
}

// told runs the program with a command that writes what it is told of containers.
func told(t *testing.T, way choose.Way, args ...string) (code int, text string) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "out")
	script := `printf '%s %s' "${PGXLOCK_TEST_CONTAINER-unset}" "$PGXLOCK_TEST_DATABASE" > "$1"`
	code = program{ways: []choose.Way{way}, names: forTests}.main(append(args, "--", "sh", "-c", script, "sh", out))
	got, _ := os.ReadFile(out) // nothing where the command did not run
	return code, string(got)
}

func TestContainerIsTakenWhereItIsWantedAndThere(t *testing.T) {
	pgtest.Long(t)
	local := haveServer(t)
	_ = os.Unsetenv(choose.ContainerEnv) // fails for malformed names only
	errNone := errors.New("none here")
	container := func(context.Context) (*choose.Server, error) {
		s := choose.NewServer("there", "a container", func(context.Context) error { return nil })
		s.Container = true
		return s, nil
	}
	if code, got := told(t, container); code != 0 || got != "unset "+local {
		t.Errorf("with a server that is named: code %d, %q", code, got)
	}
	if code, got := told(t, container, "--container"); code != 0 || got != "1 there" {
		t.Errorf("with a container: code %d, %q", code, got)
	}
	lacks := func(context.Context) (*choose.Server, error) { return nil, choose.Absent(errNone) }
	if code, got := told(t, lacks, "--container"); code != 0 || !strings.HasPrefix(got, "0 postgres:") {
		t.Errorf("on a machine without: code %d, %q", code, got)
	}
	broken := func(context.Context) (*choose.Server, error) { return nil, errNone }
	if code, got := told(t, broken, "--container"); code != exitNoServer || got != "" {
		t.Errorf("with a container that does not start: code %d, %q", code, got)
	}
	if code := tests.main([]string{"--container", "true"}); code != exitUsage {
		t.Errorf("by a program that starts none: code %d", code)
	}
}

func TestRunThatUsesTooMuchFails(t *testing.T) {
	haveServer(t)
	for counts, want := range map[string]int{
		`{"servers":2,"connections":30}`:                0,
		`{"servers":3,"connections":30}`:                1,
		`{"servers":2,"connections":31}`:                1,
		`{"databases":40}{"skipped":["it is missing"]}`: 1, // two lines
		`no counts`: 1,
	} {
		t.Setenv(pgserver.CountsEnv, "")
		script := `printf '%s' "$1" | sed 's/}{/}\n{/' >"$PGXLOCK_TEST_COUNTS"`
		if code := tests.main([]string{"--most", "servers=2,connections=30,databases=39", "--", "sh", "-c", script, "sh", counts}); code != want {
			t.Errorf("%s: code %d, want %d", counts, code, want)
		}
	}
}

func TestCountsBelongToTheOutermostRun(t *testing.T) {
	haveServer(t)
	file := filepath.Join(t.TempDir(), "counts")
	if err := os.WriteFile(file, []byte(`{"servers":3}`+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(pgserver.CountsEnv, file)
	if code := tests.main([]string{"--most", "servers=2", "true"}); code != 0 {
		t.Errorf("code %d of a run inside of another", code)
	}
}

func TestLimitsAreNamed(t *testing.T) {
	for _, text := range []string{"", "servers", "servers=0", "servers=x", "cats=1", "servers=1,,"} {
		if err := new(limits).set(text); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}

package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/leaktest"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgserver/choose"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// haveServer makes the choice fall on a server that runs already.
func haveServer(t *testing.T) *pgserver.Server {
	t.Helper()
	s, err := pgserver.Start(t.Context(), pgserver.Config{Settings: choose.Settings()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	t.Setenv(choose.DatabaseEnv, s.URL("postgres"))
	t.Setenv(choose.ServerEnv, "the one on the shelf")
	return s
}

func TestTheCommandLearnsOfTheServer(t *testing.T) {
	server := haveServer(t)
	out := filepath.Join(t.TempDir(), "out")
	script := `printf '%s\n' "$PGXLOCK_TEST_DATABASE" "$PGXLOCK_TEST_SERVER" > "$1"`
	if code := with([]string{"sh", "-c", script, "sh", out}, forTests); code != 0 {
		t.Errorf("code %d", code)
	}
	got, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	if want := server.URL("postgres") + "\nthe one on the shelf\n"; string(got) != want {
		t.Errorf("the command got %q, want %q", got, want)
	}
}

func TestTheCodeIsTheCommands(t *testing.T) {
	haveServer(t)
	for command, want := range map[string]int{
		"sh -c true":                 0,
		"sh -c false":                1,
		"sh -c exit${IFS}7":          7,
		"sh -c kill${IFS}-9${IFS}$$": exitSignal + 9,
		"no-such-command":            exitNotFound,
		"sh -c kill${IFS}-15${IFS}$PPID;exec${IFS}sleep${IFS}60": exitSignal + 15, // ours, passed on
	} {
		if got := with(strings.Fields(command), forTests); got != want {
			t.Errorf("%s: code %d, want %d", command, got, want)
		}
	}
}

func TestWithoutAServerTheCommandDoesNotRun(t *testing.T) {
	t.Setenv(choose.DatabaseEnv, "postgres:///postgres?host="+t.TempDir())
	out := filepath.Join(t.TempDir(), "out")
	if code := with([]string{"touch", out}, forTests); code != exitNoServer {
		t.Errorf("code %d, want %d", code, exitNoServer)
	}
	if _, err := os.Stat(out); err == nil {
		t.Error("the command ran")
	}
}

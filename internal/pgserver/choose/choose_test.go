package choose

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/pgserver"
)

var errBroken = errors.New("broken")

func works(name string) Way {
	return func(context.Context) (*Server, error) {
		return &Server{Description: name, stop: func(context.Context) error { return nil }}, nil
	}
}

func fails(name string) Way {
	return func(context.Context) (*Server, error) {
		return nil, fmt.Errorf("%s: %w\nmore about it", name, errBroken)
	}
}

func TestFirstWayThatWorksIsTaken(t *testing.T) {
	t.Parallel()
	server, err := first(t.Context(), works("one"), fails("two"))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := server.String(), "one"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestWayThatIsPassedOverIsSaidToThoseWhoAsk(t *testing.T) {
	t.Setenv(VerboseEnv, "")
	server, err := first(t.Context(), fails("one"), works("two"), fails("three"))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := server.String(), "two"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	t.Setenv(VerboseEnv, "1")
	if got, want := server.String(), "two (not one: broken)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestWithoutAnyWayTheErrorSaysWhyAndWhatToDo(t *testing.T) {
	t.Parallel()
	_, err := first(t.Context(), fails("one"), func(context.Context) (*Server, error) { return nil, pgserver.ErrNoBinaries })
	for _, want := range []error{ErrNoServer, errBroken, pgserver.ErrNoBinaries} {
		if !errors.Is(err, want) {
			t.Errorf("error is not %q: %v", want, err)
		}
	}
	if !strings.Contains(err.Error(), remedy) {
		t.Errorf("error does not say what to do: %v", err)
	}
}

func TestRequiredWayIsPassedOverOnlyWhereTheMachineLacksIt(t *testing.T) {
	t.Parallel()
	lacks := func(context.Context) (*Server, error) { return nil, Absent(errBroken) }
	server, err := first(t.Context(), Required(lacks), works("two"))
	if err != nil || server.Description != "two" || len(server.PassedOver) != 1 {
		t.Errorf("where the machine lacks it: %v, %v", server, err)
	}
	server, err = first(t.Context(), Required(fails("one")), works("two"))
	if !errors.Is(err, ErrNoServer) || !errors.Is(err, errBroken) {
		t.Errorf("where it fails: %v, %v; want its error", server, err)
	}
	if server, err = first(t.Context(), Required(works("one")), works("two")); err != nil || server.Description != "one" {
		t.Errorf("where it works: %v, %v", server, err)
	}
}

func TestNamedServerIsUsedAndNotStopped(t *testing.T) {
	url := os.Getenv(DatabaseEnv) // of a run of make test
	if url == "" {
		running, err := pgserver.Start(t.Context(), pgserver.Config{Settings: Settings()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := running.Stop(context.Background()); err != nil {
				t.Error(err)
			}
		})
		url = running.URL("postgres")
	}
	t.Setenv(DatabaseEnv, url)
	t.Setenv(ServerEnv, "")
	server, err := Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if server.URL != url || !strings.HasPrefix(server.Description, "PostgreSQL 1") {
		t.Errorf("got %s at %s", server.Description, server.URL)
	}
	if err := server.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	conn, err := pgconn.Connect(t.Context(), server.URL)
	if err != nil {
		t.Fatalf("a server that is not ours was stopped: %v", err)
	}
	if err := conn.Close(t.Context()); err != nil {
		t.Error(err)
	}
	t.Setenv(ServerEnv, "the one on the shelf")
	if server, err = Start(t.Context()); err != nil || server.Description != "the one on the shelf" {
		t.Errorf("got %v, %v", server, err)
	}
}

func TestNamedServerThatDoesNotAnswerIsNotReplaced(t *testing.T) {
	t.Setenv(DatabaseEnv, "postgres:///postgres?host="+t.TempDir())
	server, err := Start(t.Context())
	if !errors.Is(err, ErrNoServer) {
		t.Fatalf("got %v, %v; want ErrNoServer", server, err)
	}
	if !strings.Contains(err.Error(), DatabaseEnv) {
		t.Errorf("error does not name %s: %v", DatabaseEnv, err)
	}
}

func TestWithoutANamedServerOneIsStarted(t *testing.T) {
	t.Setenv(DatabaseEnv, "")
	server, err := Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Log(server)
	conn, err := pgconn.Connect(t.Context(), server.URL)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), "create database another").ReadAll(); err != nil {
		t.Error(err)
	}
	if err := conn.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := server.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if conn, err := pgconn.Connect(t.Context(), server.URL); err == nil {
		_ = conn.Close(t.Context())
		t.Error("the server still answers")
	}
}

func TestWayOfTheCallerComesBeforeTheBinariesOfThisMachine(t *testing.T) {
	t.Setenv(DatabaseEnv, "")
	t.Setenv(pgserver.BinDirEnv, "")
	if server, err := Start(t.Context(), works("a container")); err != nil || server.Description != "a container" {
		t.Errorf("got %v, %v", server, err)
	}
}

func TestServerOfNamedBinariesComesBeforeAContainer(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	binaries, err := pgserver.Find()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(DatabaseEnv, "")
	t.Setenv(pgserver.BinDirEnv, binaries.Dir)
	server, err := Start(t.Context(), works("a container"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if server.Description != binaries.String() || len(server.PassedOver) > 0 {
		t.Errorf("got %s, want %s", server, binaries)
	}
}

func TestNamedBinariesThatAreNotThereAreNotReplaced(t *testing.T) {
	t.Setenv(DatabaseEnv, "")
	t.Setenv(pgserver.BinDirEnv, t.TempDir())
	server, err := Start(t.Context(), works("a container"))
	if !errors.Is(err, ErrNoServer) || errors.Is(err, pgserver.ErrNoBinaries) || !strings.Contains(err.Error(), pgserver.BinDirEnv) {
		t.Fatalf("got %v, %v; want ErrNoServer that names %s", server, err, pgserver.BinDirEnv)
	}
}

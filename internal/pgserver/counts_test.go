package pgserver

import (
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestCountsOfAllProcessesAreAdded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "counts")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(CountsEnv, path)
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			if err := (&Counts{Servers: 1, Connections: 20, Databases: 3, Skipped: []string{"x"}}).Report(); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	got, err := ReadCounts(path)
	want := Counts{Servers: 10, Connections: 200, Databases: 30, Skipped: []string{"x", "x", "x", "x", "x", "x", "x", "x", "x", "x"}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
}

func TestConnectionsOfAServerAreCounted(t *testing.T) {
	path := filepath.Join(t.TempDir(), "counts")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(CountsEnv, path)
	server, err := Start(t.Context(), Config{Settings: map[string]string{"fsync": "off"}})
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		conn, err := pgconn.Connect(t.Context(), server.URL("postgres"))
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // the second one does nothing
		if err := server.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	got, err := ReadCounts(path)
	if err != nil || got.Servers != 1 || got.Connections < 6 { // one or more to see that it is up
		t.Errorf("got %+v, %v; want 1 server and at least 6 connections", got, err)
	}
}

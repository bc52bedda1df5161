package pgtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgserver/choose"
)

func TestMain(m *testing.M) { Main(m) }

func TestEachTestHasAnEmptyDatabaseOfItsOwn(t *testing.T) {
	t.Parallel()
	a, b := New(t), New(t)
	a.Exec(t, "create table here (n int); insert into here values (1), (2)")
	if n := a.Exec(t, "update here set n = $1", 7).RowsAffected(); n != 2 {
		t.Errorf("updated %d rows, want 2", n)
	}
	for _, test := range []struct {
		db   *DB
		want bool
	}{{a, true}, {b, false}} {
		var exists bool
		if err := test.db.Connect(t).QueryRow(t.Context(), "select to_regclass('here') is not null").Scan(&exists); err != nil {
			t.Fatal(err)
		}
		if exists != test.want {
			t.Errorf("table is in %s: %t, want %t", test.db.Name, exists, test.want)
		}
	}
}

func TestDatabasesAreMadeConcurrently(t *testing.T) {
	Long(t)
	t.Parallel()
	for i := range 8 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			New(t).Exec(t, "create table t ()")
		})
	}
}

func TestPrivateServerMayBeBroken(t *testing.T) {
	Long(t)
	t.Parallel()
	server := Private(t, pgserver.Config{Settings: map[string]string{"max_connections": "23"}})
	var limit, fsync, synchronousCommit string
	row := Connect(t, server.URL("postgres")).QueryRow(t.Context(),
		"select current_setting('max_connections'), current_setting('fsync'), current_setting('synchronous_commit')")
	if err := row.Scan(&limit, &fsync, &synchronousCommit); err != nil {
		t.Fatal(err)
	}
	if limit != "23" || fsync != "off" || synchronousCommit != "on" {
		t.Errorf("max_connections %s, fsync %s, synchronous_commit %s; want 23, off, on", limit, fsync, synchronousCommit)
	}
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
}

func TestDatabaseOfAConnectionStringIsReplaced(t *testing.T) {
	t.Parallel()
	for _, connString := range []string{
		"postgres://u:p%2F@h:6/old?sslmode=disable&application_name=x",
		"postgresql://u:p%2F@h:6?dbname=old&sslmode=disable&application_name=x",
		"host=h port=6 user=u password=p/ dbname=old sslmode=disable application_name=x",
	} {
		changed, err := replaceDatabase(connString, "new")
		if err != nil {
			t.Fatal(err)
		}
		c, err := pgconn.ParseConfig(changed)
		if err != nil {
			t.Fatal(err)
		}
		got := fmt.Sprint(c.Host, c.Port, c.User, c.Password, c.Database, c.RuntimeParams["application_name"], c.TLSConfig == nil)
		if want := fmt.Sprint("h", uint16(6), "u", "p/", "new", "x", true); got != want {
			t.Errorf("%s became %s: %s, want %s", connString, changed, got, want)
		}
	}
}

// The test is run in a process of its own, whose tests find no server.
func TestPackageWithoutAServerFailsOnceInThreeLines(t *testing.T) {
	t.Parallel()
	const inside = "PGXLOCK_TEST_WITHOUT_SERVER"
	if os.Getenv(inside) != "" {
		for range 3 {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				New(t)
			})
		}
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), inside+"=1", choose.DatabaseEnv+"=", pgserver.BinDirEnv+"="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if _, failed := errors.AsType[*exec.ExitError](err); !failed {
		t.Errorf("the tests ended with %v", err)
	}
	if lines := strings.Count(string(out), "\n"); lines != 3 || !strings.Contains(string(out), choose.ErrNoServer.Error()) {
		t.Errorf("%d lines:\n%s", lines, out)
	}
}

package main

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// Bad input of each kind: one line, which names the flag or the argument, and says what to do.
func TestBadInputIsNamedWithTheRemedy(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "select acquire_lock('k', 'somebody', 3600)")
	const binary = "\xff"
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().String()
	for _, test := range []struct {
		args []string
		code int
		want string // the whole line
	}{
		{[]string{"run", "-n", "--", "true"}, exitUsage, "the key is missing: pgxlock run KEY -- COMMAND (see pgxlock run --help)"},
		{[]string{"run", "k", "--wait"}, exitUsage, "--wait needs a value (duration) (see pgxlock run --help)"},
		{[]string{"run", "k", "--permits", "99999", "--", "true"}, exitUsage, "a semaphore has 1 to 10000 permits, and not 99999"},
		{[]string{"extend", "k", "--holder"}, exitUsage, "--holder needs a value (id) (see pgxlock extend --help)"},
		{[]string{"extend", "k", "--holder", "me"}, exitUsage, "--token is missing; pass the number that acquire printed"},
		{[]string{"extend", "k", "--holder", "me", "--token", "1"}, exitLost, `extend "k": the lease is lost: it expired, was released, evicted or taken over, or has another token; stop the work that it protects`},
		{[]string{"release", "k", "--holder", "me", "--token", "1"}, exitLost, `release "k": the lease is lost: it expired, was released, evicted or taken over, or has another token; somebody else may have held it meanwhile`},
		{[]string{"acquire", binary}, exitUsage, "the key is not valid UTF-8; encode binary names, for example in hexadecimal (see pgxlock acquire --help)"},
		{[]string{"acquire", "k", "--metadata", binary}, exitUsage, "--metadata is not valid UTF-8"},
		{[]string{"evict", "k", "--yes", "--reason", binary}, exitUsage, "--reason is not valid UTF-8"},
		{[]string{"evict", "k", "--yes", "--reason", "why", "--terminate"}, exitNotEvicted, `nobody holds "k" as an advisory lock; nothing was evicted; leave out --terminate to evict the holder of a lease`},
		{[]string{"ls", "--prefix", binary}, exitUsage, "--prefix is not valid UTF-8"},
		{[]string{"tree", "--name", ""}, exitUsage, `--name: the key is empty; name what is to be locked, such as "order:42"`},
		{[]string{"acquire", "k", "--schema", "nope"}, exitInternal, `schema "nope" has no pgxlock; name another one with --schema, or run pgxlock migrate up --schema nope`},
		{[]string{"extend", "k", "--holder", "me", "--token", "1", "--schema", "pg_catalog"}, exitUsage, `--schema "pg_catalog" must not begin with pg_, such schemas are the server's`},
		{[]string{"migrate", "up", "--schema", "pg_x"}, exitUsage, `--schema "pg_x" must not begin with pg_, such schemas are the server's`},
		{[]string{"migrate", "sql", "--number", "3"}, exitUsage, "--number is for files, and --format plain makes none; leave it out, or choose another --format"},
		{[]string{"migrate", "sql", "--down", "--format", "tern", "--dir", "/"}, exitUsage, "--down is for --format plain; the files of tern have both ways, up and down; leave it out"},
		{[]string{"serve", "--every", "0.5"}, exitUsage, "--every is 500ms, it must be at least 1s: each snapshot stops the server's lock table for a moment"},
		{[]string{"serve", "--listen", "8473"}, exitUsage, `--listen "8473" is a port alone; use :8473 or 127.0.0.1:8473, or unix:/path`},
		{[]string{"serve", "--listen", "::1"}, exitUsage, `--listen "::1" is no address; use host:port, such as 127.0.0.1:8473, or unix:/path`},
		{[]string{"serve", "--listen", "unix:@serve"}, exitUsage, `--listen "unix:@serve" is no socket; use unix: and a path that begins with /`},
		{[]string{"serve", "--listen", "0.0.0.0:0"}, exitUsage, "--listen 0.0.0.0:0 lets other machines in, which needs a token; set $PGXLOCK_SERVE_TOKEN or --token-file, for example to the output of openssl rand -hex 16"},
		{[]string{"serve", "--allow-evict"}, exitUsage, "--allow-evict needs a token; set $PGXLOCK_SERVE_TOKEN or --token-file, for example to the output of openssl rand -hex 16"},
		{[]string{"serve", "--listen", port}, exitUsage, "--listen " + port + ": address already in use; choose another address"},
		{[]string{"watch", "--every", "0.5"}, exitUsage, "--every is 500ms, it must be at least 1s: each snapshot stops the server's lock table for a moment"},
	} {
		r := execute(t, []string{"DATABASE_URL=" + db.URL}, test.args...)
		if want := "pgxlock: " + test.want + "\n"; r.code != test.code || r.stdout != "" || r.stderr != want {
			t.Errorf("%q: exit code %d, want %d\n%s%swant %s", test.args, r.code, test.code, r.stdout, r.stderr, want)
		}
	}
	execute(t, []string{"PGPORT=abc"}, "ls").want(t, exitUsage, "", "pgxlock: PGPORT cannot be used (invalid port); correct it, or unset it\n")
	execute(t, []string{"PGPORT=abc"}, "ls", "--database-url", "postgres://h/db").want(t, exitUsage, "", "pgxlock: PGPORT cannot be used (invalid port); correct it, or unset it\n")
}

func TestSchemaOfAnotherRoleSaysToConnectAsThatRole(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	r := execute(t, as("pg_monitor", db), "migrate", "down")
	if r.want(t, exitInternal, "", ", and this is pg_monitor: connect as postgres, or, as a member of it, name it in the connection string (?role=...)\n"); strings.Contains(r.stderr, "AfterConnect") {
		t.Error(r.stderr)
	}
}

// What grants the rights of those who lock is no remedy for one who cannot install.
func TestMigrateWithoutTheRightToCreateNamesTheGrant(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := empty(t)
	db.Exec(t, fmt.Sprintf("create schema other; alter database %s owner to pg_monitor", pgx.Identifier{db.Name}.Sanitize()))
	r := execute(t, as("pg_monitor", db), "migrate", "up", "--schema", "other")
	r.want(t, exitDenied, "", "; run GRANT CREATE ON SCHEMA other TO pg_monitor as the schema's owner, or migrate as another role\n")
	db.Exec(t, "create table other.pgxlock_migrations(version bigint)")
	db.Exec(t, "grant usage, create on schema other to pg_monitor")
	refused := execute(t, as("pg_monitor", db), "migrate", "up", "--schema", "other")
	refused.want(t, exitDenied, "", "another role")
	if strings.Contains(r.stderr+refused.stderr, "grant_locks") {
		t.Errorf("%q, %q", r.stderr, refused.stderr)
	}
}

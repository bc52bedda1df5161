package main

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// Each cause of a connection that fails has one line of its own, which is compared as a
// whole: it names user, database, host and cause once, and what to do about that cause.

// ofSource ends every such line of a command that execute runs.
func ofSource(args string) string {
	if strings.HasPrefix(args, "run ") { // a process of its own
		return "; the connection is that of DATABASE_URL\n"
	}
	return "; the connection is that of --database-url\n"
}

// tried is how often and for how long it was tried to connect.
var tried = regexp.MustCompile(` \(tried [^)]+\)`)

// wantUnconnected runs commands of all paths to the database: those of a pool, of the
// migrations and of a Locker. Before the line stands the name of the call, where it has one.
func wantUnconnected(t *testing.T, connString string, code int, want string) {
	t.Helper()
	for args, call := range map[string]string{"acquire k": "", "reap": "reap: ", "migrate up": "", "run k -- true": `acquire "k": `, "run --kind advisory k -- true": `acquire "k": `} {
		r := execute(t, []string{"DATABASE_URL=" + connString}, strings.Fields(args)...)
		r.stderr = strings.Replace(r.stderr, tried.FindString(r.stderr), "", 1) // said where it took long, once
		if line := "pgxlock: " + call + want + ofSource(args); r.code != code || r.stdout != "" || r.stderr != line {
			t.Errorf("%s: exit code %d, want %d\n%s\nwant %s", args, r.code, code, r.stderr, line)
		}
	}
}

// hostPort returns the address in a connection string.
func hostPort(t *testing.T, connString string) string {
	t.Helper()
	u, err := url.Parse(connString)
	if err != nil {
		t.Fatal(err)
	}
	return u.Host
}

// Nothing but a change of the connection helps: a script that tries again when the server is
// not there must not do so then, and nobody needs to look for the server.
func TestDeniedConnectionExits77AndSaysWhatToChange(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{TCP: true})
	right := server.TCPURL("postgres")
	wrong, err := url.Parse(right)
	if err != nil {
		t.Fatal(err)
	}
	without := *wrong
	without.User = url.User(wrong.User.Username())
	wrong.User = url.UserPassword(wrong.User.Username(), "guess")
	for _, args := range []string{"ls", "tree", "acquire k", "run --kind advisory k -- true", "doctor", "migrate status", "migrate up"} {
		for _, test := range []struct{ url, says, remedy string }{
			{wrong.String(), "(SQLSTATE 28P01)", "check the user and the password"},
			{without.String(), "(SQLSTATE 28P01)", "; no password was given: put it into PGPASSWORD, ~/.pgpass, a service file or the connection string"},
			{server.TCPURL("there_is_none"), `database "there_is_none" does not exist`, "create the database, or correct its name"},
		} {
			r := execute(t, []string{"DATABASE_URL=" + test.url}, strings.Fields(args)...)
			r.want(t, exitDenied, "", test.says)
			if strings.Count(r.stderr, test.remedy) != 1 || !strings.HasSuffix(r.stderr, ofSource(args)) || strings.Contains(r.stderr, "start the server") || strings.Contains(r.stderr, "guess") || strings.Count(r.stderr, "\n") != 1 {
				t.Errorf("%s: %q", args, r.stderr)
			}
		}
	}
	passfile := filepath.Join(t.TempDir(), "pgpass")
	if err := os.WriteFile(passfile, []byte("*:*:*:*:guess\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for password, from := range map[string]string{
		"PGPASSWORD=guess": "PGPASSWORD", "PGPASSFILE=" + passfile: "a service file or a passfile (PGPASSFILE, ~/.pgpass)",
	} {
		r := execute(t, []string{"DATABASE_URL=" + without.String(), password}, "ls")
		if r.want(t, exitDenied, "", ", the password that of "+from+"\n"); strings.Contains(r.stderr, "guess") {
			t.Errorf("%s: %q", from, r.stderr)
		}
	}
	r := execute(t, []string{"DATABASE_URL=" + right, "PGOPTIONS=-c nosuch=1"}, "ls")
	r.want(t, exitDenied, "", `"nosuch" (SQLSTATE 42704); the server refuses a setting of the connection string; correct it, or leave it out; the connection is that of DATABASE_URL, PGOPTIONS`)
	db := pgtest.DB{Pool: pgtest.Pool(t, server.URL("postgres"))}
	db.Exec(t, "create role app login password 'x'; create role group1")
	app := *wrong
	app.User = url.UserPassword("app", "x")
	for role, says := range map[string]string{
		"group1": `permission denied to set role "group1" (SQLSTATE 42501); GRANT that role to the user, or leave it out of the connection string; `,
		"nosuch": `role "nosuch" does not exist (SQLSTATE 22023); the server refuses a setting of the connection string; correct it, or leave it out; `,
	} {
		r := execute(t, []string{"DATABASE_URL=" + app.String() + "&role=" + role}, "ls")
		if r.want(t, exitDenied, "", says); strings.Count(r.stderr, role) != 1 {
			t.Errorf("%s: %q", role, r.stderr)
		}
	}
	address := hostPort(t, right)
	for _, sslmode := range []string{"disable", "prefer"} { // prefer: with TLS first, which this server refuses
		wantUnconnected(t, fmt.Sprintf("postgres://postgres:guess@%s/postgres?sslmode=%s", address, sslmode), exitDenied,
			`cannot connect as user "postgres" to database "postgres" at `+address+
				`: password authentication failed for user "postgres" (SQLSTATE 28P01); check the user and the password`)
	}
	wantUnconnected(t, strings.Replace(right, "sslmode=disable", "sslmode=require", 1), exitUnavailable,
		`cannot connect as user "postgres" to database "postgres" at `+address+`: it has no TLS; enable TLS on the server, or use sslmode=disable`)
	wantUnconnected(t, strings.Replace(server.TCPURL("there_is_none"), "sslmode=disable", "sslmode=prefer", 1), exitDenied,
		`cannot connect as user "postgres" to database "there_is_none" at `+address+
			`: database "there_is_none" does not exist (SQLSTATE 3D000); create the database, or correct its name in the connection string`)
}

func TestFullServerIsNamedAsTheCause(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{TCP: true, Settings: map[string]string{
		"max_connections": "4", "superuser_reserved_connections": "0", "autovacuum": "off",
	}})
	for range 4 {
		pgtest.Until(t, "a connection is free", func() bool { // that by which the server was seen to be ready may not have ended
			conn, err := pgx.Connect(t.Context(), server.URL("postgres"))
			if err == nil {
				t.Cleanup(func() { _ = conn.Close(context.Background()) })
			}
			return err == nil
		})
	}
	connString := strings.Replace(server.TCPURL("postgres"), "sslmode=disable", "sslmode=prefer", 1)
	wantUnconnected(t, connString, exitUnavailable,
		`cannot connect as user "postgres" to database "postgres" at `+hostPort(t, connString)+
			`: sorry, too many clients already (SQLSTATE 53300); close idle connections, or raise max_connections, or the CONNECTION LIMIT of the role or the database`)
}

func TestStandbyIsNamedAsTheCauseAndEachOfSeveralHostsWithItsOwn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{TCP: true})
	if err := server.Demote(t.Context()); err != nil {
		t.Fatal(err)
	}
	connString := server.TCPURL("postgres")
	standby := hostPort(t, connString)
	const remedy = "it is a standby; connect to the primary, or name all hosts: postgres://user@host1,host2/database"
	wantUnconnected(t, strings.Replace(connString, "sslmode=disable", "sslmode=prefer", 1), exitUnavailable,
		`cannot connect as user "postgres" to database "postgres" at `+standby+": "+remedy)
	wantUnconnected(t, strings.Replace(connString, standby, closed+","+standby, 1), exitUnavailable,
		`cannot connect as user "postgres" to database "postgres" at `+closed+`: connection refused, at `+standby+": "+remedy)
}

func TestWorkerOfCitusIsNamedAsTheCause(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{TCP: true})
	connString := server.TCPURL("postgres")
	testkit.Citus(t, &pgtest.DB{Pool: pgtest.Pool(t, connString), URL: connString, Name: "postgres"}, 1, false)
	wantUnconnected(t, connString, exitUnavailable, `cannot connect as user "postgres" to database "postgres" at `+hostPort(t, connString)+
		": it is a worker of Citus; connect to the coordinator")
}

func TestRefusedPortIsNamedAsTheCause(t *testing.T) {
	t.Parallel()
	wantUnconnected(t, "postgres://me:geheim@"+closed+"/db", exitUnavailable,
		`cannot connect as user "me" to database "db" at `+closed+`: connection refused; start the server, or correct the host and the port`)
	wantUnconnected(t, "postgres://me@"+closed, exitUnavailable, `cannot connect as user "me" to database "me" at `+closed+`: connection refused; start the server, or correct the host and the port`) // its default
}

func TestMissingSocketIsNamedAsTheCause(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	dir := t.TempDir()
	wantUnconnected(t, "postgres:///db?user=me&host="+dir, exitUnavailable,
		`cannot connect as user "me" to database "db" at `+dir+`/.s.PGSQL.5432: no such file or directory; start the server, or correct the host and the port`)
}

func TestUnknownHostIsNamedAsTheCause(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	wantUnconnected(t, "postgres://me@pgxlock.invalid:5433/db", exitUnavailable,
		`cannot connect as user "me" to database "db" at pgxlock.invalid: no such host; correct the name of the host`)
	wantUnconnected(t, "postgres://me:se@cr@pgxlock.invalid/db", exitUnavailable,
		`cannot connect as user "me" to database "db" at pgxlock.invalid: no such host; special characters in a password must be percent-encoded`)
}

func TestSilentServerIsNamedAsTheCause(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections, and never answers
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = silent.Close() })
	address := silent.Addr().String()
	wantUnconnected(t, "postgres://me@"+address+"/db?connect_timeout=1&sslmode=disable", exitUnavailable,
		`cannot connect as user "me" to database "db" at `+address+`: no answer in time; check the host, the port, and firewalls in between`)
}

func TestErrorNamesWhatDependsOnAnObject(t *testing.T) {
	t.Parallel()
	err := &pgconn.PgError{Code: pgerrcode.DependentObjectsStillExist, Message: "cannot drop view lock_leases", Detail: "view mine depends on view lock_leases\nview yours\x1b depends on it"}
	if text := describe(newRun().Flags(), err); !strings.Contains(text, "view mine depends on view lock_leases") || strings.ContainsAny(text, "\n\x1b") {
		t.Errorf("%q", text)
	}
}

// An error points to something that a user of the installed program has: a command, or an
// address.
func TestErrorsNameNoFileOfTheSource(t *testing.T) {
	t.Parallel()
	err := &pgconn.PgError{Code: pgerrcode.InsufficientPrivilege}
	if text := strings.ReplaceAll(describe(newRun().Flags(), err), lockerr.ManualRights, ""); strings.Contains(text, "docs/") || strings.Contains(text, "scripts/") || strings.Contains(text, "source") {
		t.Errorf("%q", text)
	}
}

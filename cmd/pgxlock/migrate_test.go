package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestMigrateInstallsShowsAndRemoves(t *testing.T) {
	t.Parallel()
	db := empty(t)
	migrate := func(args ...string) result {
		t.Helper()
		return execute(t, []string{"DATABASE_URL=" + db.URL}, append([]string{"migrate"}, args...)...)
	}
	migrate("status").want(t, exitNotCurrent, "not installed", "")
	at := fmt.Sprintf(` schema "public" of database %q`, db.Name)
	migrate("down").want(t, exitOK, "", "nothing to remove in"+at)
	migrate("repair").want(t, exitInternal, "", "pgxlock migrate up")
	db.Exec(t, `create schema planted authorization pg_monitor;
		create function planted.pgxlock_version() returns bigint language sql return 8;
		create function planted.acquire_lock(varchar, varchar, integer, jsonb) returns boolean language sql return true`)
	migrate("up", "--schema", "public").want(t, exitUsage, "", `schema "planted" is not trusted: role "pg_monitor" owns the schema`)
	db.Exec(t, "drop schema planted cascade")
	migrate("up").want(t, exitOK, "", "installed, version 8 in"+at)
	migrate("up").want(t, exitOK, "", "already current, version 8 in"+at)
	migrate("status").want(t, exitOK, db.Name+"  public  8          8       current", "")
	migrate("repair").want(t, exitOK, "", "version 8 in"+at)
	migrate("up", "--schema", "nosuch").want(t, exitUsage, "", `pgxlock is in schema "public" already`)
	migrate("status", "--schema", "nosuch").want(t, exitNotCurrent, "not installed", "")
	execute(t, []string{"DATABASE_URL=" + db.URL}, "ls", "--schema", "nosuch").want(t, exitInternal, "", "pgxlock: schema missing or out of date; run pgxlock migrate up --schema nosuch: ")
	migrate("up", "--schema", "nosuch", "--another").want(t, exitOK, "", `installed, version 8 in schema "nosuch"`)
	migrate("up", "--schema", "nosuch").want(t, exitOK, "", `already current, version 8 in schema "nosuch"`)
	migrate("down", "--schema", "nosuch").want(t, exitOK, "", `removed, version 8 from schema "nosuch"`)

	var status schemaStatus
	if err := json.Unmarshal([]byte(migrate("status", "-o", "json").stdout), &status); err != nil {
		t.Fatal(err)
	}
	if status.Installed == 0 || status.Installed != status.Newest || status.State != stateCurrent || status.Database != db.Name || status.Schema != "public" {
		t.Errorf("status %+v", status)
	}

	db.Exec(t, "update pgxlock_migrations set version = 99")
	migrate("status").want(t, exitNotCurrent, "99         8       newer than this program", "")
	migrate("up").want(t, exitInternal, "", "the schema has version 99")
	db.Exec(t, "update pgxlock_migrations set version = 8")

	if testing.Short() {
		migrate("down").want(t, exitOK, "", "removed, version 8 from"+at+"; left: the schema, and its empty table pgxlock_migrations\n")
		migrate("status").want(t, exitNotCurrent, "not installed", "")
		return
	}
	db.Exec(t, "select claim_once('order:42')")
	migrate("down").want(t, exitBusy, "", "claims in schema")
	migrate("status").want(t, exitOK, "current", "") // nothing was removed
	migrate("down", "--force").want(t, exitOK, "", "removed")
	migrate("up").want(t, exitOK, "", "installed, version ")
	db.Exec(t, "select acquire_lock('k', 'somebody', 300)")
	migrate("down").want(t, exitBusy, "", ": 1 (SQLSTATE 55006); stop their holders (pgxlock ls shows them); or remove the leases under them: add --force\n")
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "lock table distributed_locks"); err != nil {
		t.Fatal(err)
	}
	migrate("down", "--force").want(t, exitBusy, "", "; run it again; pgxlock doctor names the session")
	execute(t, []string{"DATABASE_URL=" + db.URL}, "ls").want(t, exitBusy, "", "pgxlock: another session keeps a table or a row of pgxlock locked: ")
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	db.Exec(t, "select extend_lock('k', 'somebody', 300)") // is still held
	migrate("down", "--force").want(t, exitOK, "", "removed")
	migrate("down").want(t, exitOK, "", "nothing to remove")
	migrate("status").want(t, exitNotCurrent, "not installed", "")
}

// A misspelt schema is an error, and not a success.
func TestSchemaThatIsNotThereIsNamed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := empty(t)
	env := []string{"DATABASE_URL=" + db.URL}
	execute(t, env, "migrate", "down", "--schema", "nosuch").want(t, exitInternal, "", `there is no schema "nosuch"`)
	execute(t, env, "migrate", "down", "--schema", "nosuch", "--force").want(t, exitInternal, "", `there is no schema "nosuch"`)
	execute(t, env, "migrate", "repair", "--schema", "nosuch").want(t, exitInternal, "", `in schema "nosuch"`)
	execute(t, env, "migrate", "status", "--schema", "nosuch").want(t, exitNotCurrent, "not installed", "")
	db.Exec(t, "create schema nothing")
	execute(t, env, "migrate", "down", "--schema", "nothing").want(t, exitOK, "", "nothing to remove")
}

func TestDamagedSchemaIsReportedAndMended(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	env := []string{"DATABASE_URL=" + db.URL}
	for missing, damage := range map[string]string{
		"table pgxlock_waiters":    "drop table pgxlock_waiters cascade",
		"function acquire_lock":    "drop function acquire_lock cascade",
		"function pgxlock_version": "drop function pgxlock_version()",
	} {
		db.Exec(t, damage)
		execute(t, env, "migrate", "status").want(t, exitNotCurrent, "damaged", missing)
		execute(t, env, "migrate", "status", "-o", "json").want(t, exitNotCurrent, `"`+missing+`"`, missing)
		execute(t, env, "migrate", "repair").want(t, exitInternal, "", "run pgxlock migrate up")
		execute(t, env, "migrate", "down").want(t, exitInternal, "", "run pgxlock migrate up")
		if r := execute(t, env, "doctor"); r.code != exitUnsound || !strings.Contains(r.stdout, "pgxlock migrate up") {
			t.Errorf("doctor: exit code %d\n%s%s", r.code, r.stdout, r.stderr)
		}
		if missing == "function acquire_lock" { // what needs no part that is missing works
			execute(t, env, "doctor").want(t, exitUnsound, `has version 8; it lacks function acquire_lock`, "")
			execute(t, env, "ls").want(t, exitOK, "KEY", "")
			execute(t, env, "tree").want(t, exitOK, "nobody waits", "")
			execute(t, env, "run", "job", "--", "true").want(t, exitOK, "", "")
		}
		execute(t, env, "migrate", "up").want(t, exitOK, "", "restored, version ")
		execute(t, env, "migrate", "status").want(t, exitOK, "current", "")
		execute(t, env, "acquire", "k", "--holder", "me", "--ttl", "1s").want(t, exitOK, "me", "")
	}
}

func TestMigrateNamesWhatItRestored(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	migrate := func(command, says string) {
		t.Helper()
		execute(t, []string{"DATABASE_URL=" + db.URL}, "migrate", command).want(t, exitOK, "", fmt.Sprintf(` version 8 in schema "public" of database %q%s`+"\n", db.Name, says))
	}
	db.Exec(t, "truncate pgxlock_epoch, pgxlock_migrations")
	migrate("repair", "; restored: row of pgxlock_epoch, row of pgxlock_migrations")
	migrate("repair", "")
	db.Exec(t, "drop view lock_leases cascade")
	migrate("up", ": view lock_holders, view lock_leases, view lock_waiters")
	db.Exec(t, `do $$ declare one regprocedure; begin
		for one in select oid from pg_proc where pronamespace = 'public'::regnamespace and proname in (
			'acquire_lock', 'advisory_lock_key', 'allow_rate', 'claim_once', 'claim_request', 'finish_run', 'forget_run', 'harden_locks', 'list_runs', 'lock_tx', 'soften_locks', 'start_run_at')
		loop execute 'drop function ' || one || ' cascade'; end loop; end $$`)
	migrate("up", ": function acquire_lock, function advisory_lock_key, function allow_rate, function claim_once, function claim_request, "+
		"function finish_run, function forget_run, function harden_locks, function list_runs, function lock_tx and 2 more")
	migrate("up", "")
}

// The commands of docs/install.md, one by one, on two servers.
func TestTokensGoOnInALogicalCopyAsThePageSays(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	page, err := os.ReadFile("../../docs/install.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "### A logical copy")
	_, block, _ := strings.Cut(section, "```sh\n")
	block, after, _ := strings.Cut(block, "```")
	commands := strings.Split(strings.TrimSpace(block), "\n")
	renew := regexp.MustCompile("`(TRUNCATE [a-z_]+)`").FindStringSubmatch(after)
	if len(commands) != 7 || renew == nil {
		t.Fatalf("docs/install.md has %d lines for a logical copy, and for one with the migrations %q", len(commands), renew)
	}
	logical := pgserver.Config{Settings: map[string]string{"wal_level": "logical"}}
	blue := pgtest.Private(t, logical).URL("postgres")
	orders := func(url string) bool {
		var n int
		err := pgtest.Connect(t, url).QueryRow(t.Context(), "select count(*) from orders").Scan(&n)
		return err == nil && n == 1
	}
	token := func(url string) (token int64) {
		t.Helper()
		const next = "select fencing_token from try_acquire_lock(clock_timestamp()::text, 'A')"
		if err := pgtest.Connect(t, url).QueryRow(t.Context(), next).Scan(&token); err != nil {
			t.Fatal(err)
		}
		return token
	}
	execute(t, []string{"DATABASE_URL=" + blue}, "migrate", "up").want(t, exitOK, "", "installed")
	if _, err := pgtest.Connect(t, blue).Exec(t.Context(), "create table orders (id int primary key); insert into orders values (1)"); err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	if err := os.Symlink(itself(t), filepath.Join(bin, "pgxlock")); err != nil {
		t.Fatal(err)
	}
	if binaries, err := pgserver.Find(); err == nil {
		bin += ":" + binaries.Dir
	}
	for _, migrated := range []bool{false, true} {
		green := pgtest.Private(t, logical).URL("postgres")
		env := []string{"BLUE=" + blue, "GREEN=" + green, "PATH=" + bin + ":" + os.Getenv("PATH")}
		run := func(command string) string {
			t.Helper()
			cmd := program(t, env)
			cmd.Path, cmd.Args = "/bin/sh", []string{"sh", "-c", command}
			r := finish(t, cmd)
			if r.code != exitOK && !strings.Contains(command, "pgxlock doctor") { // which minds what test servers lack
				t.Fatalf("%s: exit code %d\n%s%s", command, r.code, r.stdout, r.stderr)
			}
			return r.stdout
		}
		if migrated {
			run(`DATABASE_URL=$GREEN pgxlock migrate up; psql "$GREEN" -c 'create table orders (id int primary key)'`)
		} else {
			run(commands[0])
			execute(t, []string{"DATABASE_URL=" + green}, "migrate", "status").want(t, exitNotCurrent, "damaged", "row of pgxlock_epoch")
			execute(t, []string{"DATABASE_URL=" + green}, "acquire", "k").want(t, exitInternal, "", "LK003")
			run(commands[1])
		}
		run(commands[2])
		pgtest.Until(t, "the copy has caught up", func() bool { return orders(green) })
		before := token(blue)
		run(commands[4])
		if migrated {
			run(`psql "$GREEN" -c '` + renew[1] + `'`)
		}
		run(commands[5])
		if found := run(commands[6]); !regexp.MustCompile("(?m)^ok +tokens ").MatchString(found) || !regexp.MustCompile("(?m)^ok +schema ").MatchString(found) {
			t.Errorf("migrated %t: %s", migrated, found)
		}
		execute(t, []string{"DATABASE_URL=" + green}, "migrate", "status").want(t, exitOK, "current", "")
		if next := token(green); next <= before {
			t.Errorf("migrated %t: token %d after %d", migrated, next, before)
		}
	}
}

func TestMigrateWorksInASchemaOfItsOwn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := empty(t)
	env := []string{"DATABASE_URL=" + db.URL}
	execute(t, env, "migrate", "up", "--schema", "Locks").want(t, exitOK, "", "installed")
	execute(t, env, "migrate", "status", "--schema", "Locks").want(t, exitOK, "current", "")
	execute(t, env, "migrate", "status").want(t, exitOK, "Locks", "") // the only one there is
	execute(t, env, "migrate", "up").want(t, exitOK, "", `already current, version 8 in schema "Locks"`)
	db.Exec(t, `select "Locks".acquire_lock('k', 'somebody', 300)`)
	execute(t, env, "ls").want(t, exitOK, "somebody", "")
	execute(t, env, "ls", "--schema", "Locks").want(t, exitOK, "somebody", "")
	execute(t, env, "migrate", "down", "--schema", "Locks", "--force").want(t, exitOK, "", "removed")
}

func TestMigrateSQLOutputRunsThroughPsql(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	psql, err := exec.LookPath("psql")
	if err != nil {
		binaries, err := pgserver.Find()
		if err != nil {
			t.Fatalf("this test needs psql: %v", err)
		}
		psql = binaries.Dir + "/psql"
	}
	db := empty(t)
	env := []string{"DATABASE_URL=" + db.URL}
	feed := func(first, second string, args ...string) {
		t.Helper()
		sql := execute(t, nil, append([]string{"migrate", "sql"}, args...)...)
		sql.want(t, exitOK, "-- "+first, "")
		sql.want(t, exitOK, "-- "+second, "")
		if strings.Index(sql.stdout, "-- "+first) > strings.Index(sql.stdout, "-- "+second) {
			t.Errorf("%s comes after %s", first, second)
		}
		cmd := exec.CommandContext(t.Context(), psql, "-X", "-1", "-q", "-v", "ON_ERROR_STOP=1", "-f", "-", db.URL)
		cmd.Stdin = strings.NewReader(sql.stdout)
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Fatalf("psql: %v\n%s", err, out)
		}
	}
	feed("000002_transactions.up.sql", "000003_advisory.up.sql")
	execute(t, env, "migrate", "status").want(t, exitOK, "current", "")
	execute(t, env, "migrate", "up").want(t, exitOK, "", "already current")
	feed("000003_advisory.down.sql", "000002_transactions.down.sql", "--down")
	execute(t, env, "migrate", "status").want(t, exitNotCurrent, "not installed", "")
}

func TestOlderVersionIsOutdatedAndUpgraded(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := empty(t)
	env := []string{"DATABASE_URL=" + db.URL}
	oldest, err := migrations.FS.ReadFile("000001_leases.up.sql")
	if err != nil {
		t.Fatal(err)
	}
	db.Exec(t, string(oldest))
	db.Exec(t, "select acquire_lock('k', 'somebody', 300)")
	execute(t, env, "migrate", "status").want(t, exitNotCurrent, "outdated", "")
	status, err := migrations.Version(t.Context(), db.Pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	execute(t, env, "migrate", "up").want(t, exitOK, "", fmt.Sprintf("upgraded, version %d in ", status.Newest))
	execute(t, env, "migrate", "status").want(t, exitOK, "current", "")
	execute(t, env, "ls").want(t, exitOK, "somebody", "")
}

// While a newer program is rolled out.
func TestNewerVersionIsWorkedOnAndLeftAsItIs(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	future, err := os.ReadFile("../../testdata/future.sql")
	if err != nil {
		t.Fatal(err)
	}
	db := empty(t)
	env := []string{"DATABASE_URL=" + db.URL}
	execute(t, env, "migrate", "up").want(t, exitOK, "", "installed, version ")
	db.Exec(t, string(future))
	unchanged := func() {
		t.Helper()
		execute(t, env, "migrate", "status").want(t, exitNotCurrent, "newer than this program", "")
	}
	unchanged()
	execute(t, env, "migrate", "up").want(t, exitOK, "", "nothing to do")
	for _, args := range [][]string{{"migrate", "down"}, {"migrate", "down", "--force"}, {"migrate", "repair"}} {
		execute(t, env, args...).want(t, exitInternal, "", "use a newer one")
	}
	unchanged()
	acquired := execute(t, env, "acquire", "k", "--holder", "me")
	acquired.want(t, exitOK, "me", "")
	token, _, _ := strings.Cut(acquired.stdout, " ")
	execute(t, env, "ls").want(t, exitOK, "me", "")
	execute(t, env, "extend", "k", "--holder", "me", "--token", token).want(t, exitOK, "Z", "")
	execute(t, env, "release", "k", "--holder", "me", "--token", token).want(t, exitOK, "", "")
}

func TestEveryRelationOfTwoVersionsHasAState(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		installed, newest uint
		want              string
	}{{0, 2, "not installed"}, {1, 2, "outdated"}, {2, 2, "current"}, {3, 2, "newer than this program"}} {
		if got := newSchemaStatus(migrations.Status{Installed: test.installed, Newest: test.newest}, nil).State; got != test.want {
			t.Errorf("%d of %d: %s, want %s", test.installed, test.newest, got, test.want)
		}
	}
}

func TestFailureThatIsNobodysTurnExits70(t *testing.T) {
	t.Parallel()
	if code := exitCode(errors.New("anything else")); code != exitInternal {
		t.Errorf("exit code %d", code)
	}
}

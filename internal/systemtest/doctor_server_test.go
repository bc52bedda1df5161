package systemtest_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// What Doctor finds at a server: what it pretends, its settings, and what is used up
// of it.

// Engines that speak PostgreSQL's protocol may have the functions, and not what
// they are for; clocks and ages are made up likewise.
func TestDoctorFindsWhatAServerOnlyPretends(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{Settings: map[string]string{"allow_system_table_mods": "on", "fsync": "on"}})
	admin := testkit.On(t, "", server)
	for name, test := range map[string]struct {
		stub  string
		check string
		want  doctor.Status
		says  string
	}{
		"locks that are always granted": {
			"create or replace function pg_catalog.pg_try_advisory_lock(bigint) returns boolean language sql as 'select true'",
			"advisory", statusError, "grants advisory locks and does not keep them",
		},
		"notifications that go nowhere": {
			`alter function pg_catalog.pg_notify(text, text) rename to real_notify;
			 create function pg_catalog.pg_notify(text, text) returns void language sql as ''`,
			"notify", statusWarning, "did not arrive",
		},
		"a clock ahead": {
			"create or replace function pg_catalog.clock_timestamp() returns timestamptz language sql as 'select pg_catalog.statement_timestamp() + interval ''90 minutes'''",
			"clock", statusWarning, "s ahead of ours",
		},
		"a clock behind": {
			"create or replace function pg_catalog.clock_timestamp() returns timestamptz language sql as 'select pg_catalog.statement_timestamp() - interval ''90 minutes'''",
			"clock", statusWarning, "s behind ours",
		},
		"rows that autovacuum did not freeze": {
			"create or replace function pg_catalog.age(xid) returns integer language sql as 'select 400000000'",
			"wraparound", statusWarning, "400000000 transactions old",
		},
		"hardly any transactions left": {
			"create or replace function pg_catalog.age(xid) returns integer language sql as 'select 1700000000'",
			"wraparound", statusError, "refuses to write",
		},
	} {
		t.Run(name, func(t *testing.T) {
			database := strings.ReplaceAll(name, " ", "_")
			admin.Exec(t, "create database "+database)
			db := &pgtest.DB{Pool: pgtest.Pool(t, server.URL(database)), URL: server.URL(database), Name: database}
			install(t, db, "")
			wantRestOK(t, examine(t, db, nil))
			db.Exec(t, test.stub)
			findings := examine(t, db, nil)
			wantFinding(t, findings, test.check, test.want, test.says)
			wantRestOK(t, findings, test.check)
		})
	}
}

func TestDoctorFindsTimeoutsAndWhereTheyAreSet(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Controlled(t, testkit.Migrated(t))
	wantFinding(t, examine(t, db, nil), "timeouts", statusOK, "none is set")
	for name, test := range map[string]struct{ short, long, shown string }{
		"statement_timeout":                   {"'900ms'", "'1s'", "900ms"},
		"lock_timeout":                        {"'50ms'", "'1s'", "50ms"},
		"idle_in_transaction_session_timeout": {"'9s'", "'10s'", "9s"},
		"idle_session_timeout":                {"'9s'", "'10s'", "9s"},
		"transaction_timeout":                 {"'9s'", "'10s'", "9s"},
	} {
		if !testkit.Query[bool](t, db, "select current_setting($1, true) is not null", name) {
			continue // transaction_timeout came with 17
		}
		testkit.Set(t, db, map[string]string{name: test.short})
		wantFinding(t, examine(t, db, nil), "timeouts", statusWarning, name+" = "+test.shown+" (ALTER ROLE IN DATABASE)", name+" ends ", "raise "+name)
		testkit.Set(t, db, map[string]string{name: test.long})
		wantFinding(t, examine(t, db, nil), "timeouts", statusOK, name+" = ")
	}
	testkit.Set(t, db, nil)
	database := "alter database " + pgx.Identifier{db.Name}.Sanitize()
	db.Exec(t, database+" set lock_timeout = 50")
	db.Exec(t, database+" set statement_timeout = '1h'")
	wantFinding(t, examine(t, db, nil), "timeouts", statusWarning, "lock_timeout = 50ms (ALTER DATABASE)", "statement_timeout = 1h0m0s")
	db.Exec(t, database+" reset all")
	through := &pgtest.DB{Pool: db.NewPool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["statement_timeout"] = "900" })}
	wantFinding(t, examine(t, through, nil), "timeouts", statusWarning, "the connection string or the pool's RuntimeParams")
	through = &pgtest.DB{Pool: db.NewPool(t, func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "set idle_in_transaction_session_timeout = '5s'")
			return err
		}
	})}
	wantFinding(t, examine(t, through, nil), "timeouts", statusWarning, "AfterConnect")
}

// What a role is set to keeps no check from being made.
func TestDoctorWorksWhateverTheRoleIsSetTo(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Controlled(t, testkit.Migrated(t))
	settings := testkit.Together()
	for name, value := range map[string]string{ // shorter ones would end it before its own stand
		"statement_timeout": "'900ms'", "lock_timeout": "'900ms'", "idle_session_timeout": "'9s'", "idle_in_transaction_session_timeout": "'9s'",
	} {
		settings[name] = value
	}
	testkit.Set(t, db, settings)
	findings := examine(t, db, nil)
	wantFinding(t, findings, "primary", statusWarning, "default_transaction_read_only = on", "25006", "READ WRITE")
	wantFinding(t, findings, "timeouts", statusWarning)
	wantFinding(t, findings, "durability", findings["durability"].Status, "synchronous_commit = off", "with the claims") // fsync is the server's
	wantRestOK(t, findings, "primary", "timeouts", "durability", "lock_table")                                           // others fill it
	if len(findings) != len(doctorChecks) {
		t.Errorf("%d findings", len(findings))
	}
}

func TestDoctorFindsWhatACrashWouldCost(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	_, db := privateServer(t, map[string]string{"fsync": "on", "full_page_writes": "off"})
	wantFinding(t, examine(t, db, nil), "durability", statusWarning, "full_page_writes = off (the server's configuration)", "half written")
	db.Exec(t, "alter database postgres set synchronous_commit = off")
	findings := examine(t, db, nil)
	wantFinding(t, findings, "durability", statusWarning, "synchronous_commit = off (ALTER DATABASE)", "can be lost after their commit")
	wantRestOK(t, findings, "durability")
	_, db = privateServer(t, map[string]string{"full_page_writes": "off"})
	wantFinding(t, examine(t, db, nil), "durability", statusError, "fsync = off", "set fsync = on", "full_page_writes = off")
}

func TestDoctorFindsALockTableThatFillsUp(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	_, db := privateServer(t, map[string]string{"max_locks_per_transaction": "10", "max_connections": "20", "fsync": "on"})
	wantRestOK(t, examine(t, db, nil))
	filler := db.Connect(t)
	for _, test := range []struct {
		locks int
		want  doctor.Status
		says  string
	}{{100, statusWarning, "more than half full"}, {180, statusError, "no session of the server"}} {
		if _, err := filler.Exec(t.Context(), fmt.Sprintf("select pg_advisory_unlock_all(); select pg_advisory_lock(7, i) from generate_series(1, %d) i", test.locks)); err != nil {
			t.Fatal(err)
		}
		findings := examine(t, db, nil)
		wantFinding(t, findings, "lock_table", test.want, "of about 200 places", test.says, "max_locks_per_transaction")
		wantRestOK(t, findings, "lock_table")
	}
}

func TestDoctorFindsPreparedTransactionsThatHoldLocks(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	_, db := privateServer(t, safe)
	conn := db.Connect(t)
	prepare := func(lock, id string) {
		t.Helper()
		for _, sql := range []string{"begin", lock, "prepare transaction '" + id + "'"} {
			if _, err := conn.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
	}
	db.Exec(t, "create table mine (n int)")
	prepare("lock table mine", "other")
	wantRestOK(t, examine(t, db, nil))
	prepare("select lock_tx('k')", "it''s")
	wantFinding(t, examine(t, db, nil), "prepared", statusWarning, "'it''s' was prepared", "holds 1 lock,", "ROLLBACK PREPARED 'it''s'")
	db.Exec(t, "rollback prepared 'it''s'")
	prepare("lock table distributed_locks in row exclusive mode", "table")
	findings := examine(t, db, nil)
	wantFinding(t, findings, "prepared", statusWarning, "'table' was prepared", "holds 1 lock,")
	wantRestOK(t, findings, "prepared")
	db.Exec(t, "rollback prepared 'table'")
	wantRestOK(t, examine(t, db, nil))
}

func TestDoctorFindsTransactionsThatHoldBackVacuum(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	atOnce := &doctor.Config{LongTransaction: 1}
	wantFinding(t, examine(t, db, atOnce), "snapshots", statusOK)
	for name, statements := range map[string][]string{
		"reads":  {"begin isolation level repeatable read", "select count(*) from pg_class"},
		"writes": {"begin isolation level read committed", "create table t ()"}, // has a snapshot only while it runs a statement
	} {
		conn := pgtest.Connect(t, db.URL)
		for _, sql := range append([]string{"set application_name = '" + name + "'"}, statements...) {
			if _, err := conn.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
		wantFinding(t, examine(t, db, atOnce), "snapshots", statusWarning, name+" has held back vacuum", "pg_terminate_backend")
		wantFinding(t, examine(t, db, nil), "snapshots", statusOK, "for 1h0m0s")
		if _, err := conn.Exec(t.Context(), "rollback"); err != nil {
			t.Fatal(err)
		}
		wantFinding(t, examine(t, db, atOnce), "snapshots", statusOK)
	}
}

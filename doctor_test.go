package pgxlock_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// What Doctor finds at a server, and on the way to it. Each check has a place here,
// or in doctor_schema_test.go, where it is not content.

// doctorChecks are the names of all checks, in order.
var doctorChecks = strings.Fields(`primary pooler advisory notify schema search_path tokens row_security collation expired
	clock timeouts durability lock_table prepared snapshots wraparound`)

// examine returns the findings by their checks.
func examine(t *testing.T, db *pgtest.DB, cfg *pgxlock.DoctorConfig) map[string]pgxlock.Finding {
	t.Helper()
	findings, err := pgxlock.Doctor(t.Context(), db.Pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	byCheck := make(map[string]pgxlock.Finding)
	for _, f := range findings {
		if _, twice := byCheck[f.Check]; twice {
			t.Errorf("%s is there twice", f.Check)
		}
		if byCheck[f.Check] = f; f.Status != statusOK && f.Advice == "" || f.Detail == "" || strings.ContainsAny(f.Detail+f.Advice, "\n") {
			t.Errorf("without advice, or detail, or of several lines: %+v", f)
		}
	}
	return byCheck
}

// wantFinding checks one of them, whose detail or advice must say the words.
func wantFinding(t *testing.T, findings map[string]pgxlock.Finding, check string, want pgxlock.Status, words ...string) {
	t.Helper()
	f, there := findings[check]
	if !there || f.Status != want {
		t.Errorf("%s: %+v, want status %q", check, f, want)
	}
	for _, word := range words {
		if !strings.Contains(f.Detail+"\n"+f.Advice, word) {
			t.Errorf("%s does not say %q: %+v", check, word, f)
		}
	}
}

// wantRestOK checks that nothing else was found.
func wantRestOK(t *testing.T, findings map[string]pgxlock.Finding, but ...string) {
	t.Helper()
	for check := range maps.Keys(findings) {
		if !slices.Contains(but, check) {
			wantFinding(t, findings, check, statusOK)
		}
	}
}

const statusOK, statusWarning, statusError = pgxlock.StatusOK, pgxlock.StatusWarning, pgxlock.StatusError

// safe are settings of a server that keeps what it was told.
var safe = map[string]string{"fsync": "on", "max_prepared_transactions": "5"}

func TestASoundServerHasEveryCheckAndNothingToDo(t *testing.T) {
	t.Parallel()
	_, db := privateServer(t, safe)
	for range 2 { // it leaves nothing that it would find
		findings, err := pgxlock.Doctor(t.Context(), db.Pool, nil)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, f := range findings {
			if names = append(names, f.Check); f.Status != statusOK || f.Advice != "" {
				t.Errorf("%+v", f)
			}
		}
		if !slices.Equal(names, doctorChecks) {
			t.Errorf("checks %v, want %v", names, doctorChecks)
		}
	}
	until(t, "its connections are gone", func() bool {
		return query[int](t, db, "select count(*) from pg_stat_activity where application_name = 'pgxlock doctor'") == 0
	})
	if n := advisoryCount(t, db); n != 0 {
		t.Errorf("%d advisory locks are left", n)
	}
}

func TestDoctorRefusesBadArguments(t *testing.T) {
	t.Parallel()
	for says, call := range map[string]func() error{
		"the pool is nil": func() error { _, err := pgxlock.Doctor(t.Context(), nil, nil); return err },
		"DoctorConfig.Schema": func() error {
			_, err := pgxlock.Doctor(t.Context(), unconnected(t), &pgxlock.DoctorConfig{Schema: "pg_x"})
			return err
		},
		"DoctorConfig.LongTransaction is -1s": func() error {
			_, err := pgxlock.Doctor(t.Context(), unconnected(t), &pgxlock.DoctorConfig{LongTransaction: -time.Second})
			return err
		},
	} {
		err := call()
		if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Op != "doctor" {
			t.Errorf("%v, want an *Error of doctor", err)
			continue
		}
		wantOneLine(t, err, says)
	}
}

func TestDoctorFindsAStandby(t *testing.T) {
	t.Parallel()
	server, primary := privateServer(t, safe)
	standby := pgtest.Standby(t, server, pgserver.Config{})
	findings := examine(t, on(t, "", standby), nil)
	wantFinding(t, findings, "primary", statusError, "standby", "connect to the primary")
	if len(findings) != 1 {
		t.Errorf("%v", findings)
	}
	// Of several hosts it takes that which Lockers take.
	findings = examine(t, on(t, "", standby, server), nil)
	wantFinding(t, findings, "durability", statusWarning, "1 standbys, none of them synchronous", "synchronous_standby_names")
	wantRestOK(t, findings, "durability")

	// A role that cannot see which standbys are synchronous is told so.
	_, plain := login(t, primary)
	primary.Exec(t, "alter system set synchronous_standby_names = '*'")
	primary.Exec(t, "select pg_reload_conf()")
	var durability pgxlock.Finding
	looksNow := func(db *pgtest.DB, status pgxlock.Status, says string) func() bool {
		return func() bool {
			durability = examine(t, db, nil)["durability"]
			return durability.Status == status && strings.Contains(durability.Detail, says)
		}
	}
	until(t, "the standby is synchronous", looksNow(primary, statusOK, "a failover to a synchronous standby"))
	until(t, "and it may not be told", looksNow(plain, statusWarning, "may not see whether a synchronous standby"))
	if !strings.Contains(durability.Advice, "pg_read_all_stats") {
		t.Error(durability)
	}
	if err := standby.Kill(); err != nil {
		t.Fatal(err)
	}
	until(t, "commits wait for ever", looksNow(primary, statusError, "no synchronous standby is connected"))
	primary.Exec(t, "alter system reset synchronous_standby_names") // for what is committed after the test
	primary.Exec(t, "select pg_reload_conf()")
}

func TestDoctorTellsThePoolersModeAndLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	behindPoolers(t, nil, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		findings := examine(t, &pgtest.DB{Pool: pgtest.Pool(t, pooler.URL("postgres"))}, nil)
		wantFinding(t, findings, "notify", statusWarning, "do not LISTEN through a pooler", "polling")
		switch mode {
		case "session":
			wantFinding(t, findings, "pooler", statusOK, "session mode", "AdvisoryConfig.SessionPooler")
			wantFinding(t, findings, "advisory", statusOK)
		case "transaction":
			wantFinding(t, findings, "pooler", statusWarning, "transaction mode", "ClaimTx work", "NewLease")
			wantFinding(t, findings, "advisory", statusWarning, "not looked at", "the server itself")
		case "statement":
			wantFinding(t, findings, "pooler", statusWarning, "statement mode", "so is every transaction", "NewLease")
			wantFinding(t, findings, "advisory", statusWarning, "not looked at", "the server itself")
		}
		wantRestOK(t, findings, "notify", "pooler", "advisory", "durability") // fsync is off
	})
}

// Engines that speak PostgreSQL's protocol may have the functions, and not what
// they are for; clocks and ages are made up likewise.
func TestDoctorFindsWhatAServerOnlyPretends(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{Settings: map[string]string{"allow_system_table_mods": "on", "fsync": "on"}})
	admin := on(t, "", server)
	for name, test := range map[string]struct {
		stub  string
		check string
		want  pgxlock.Status
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
			"clock", statusWarning, " 1h",
		},
		"a clock behind": {
			"create or replace function pg_catalog.clock_timestamp() returns timestamptz language sql as 'select pg_catalog.statement_timestamp() - interval ''90 minutes'''",
			"clock", statusWarning, " -1h",
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
	t.Parallel()
	db := controlled(t, migrated(t))
	wantFinding(t, examine(t, db, nil), "timeouts", statusOK, "none is set")
	for name, test := range map[string]struct{ short, long, shown string }{
		"statement_timeout":                   {"'900ms'", "'1s'", "900ms"},
		"lock_timeout":                        {"'50ms'", "'1s'", "50ms"},
		"idle_in_transaction_session_timeout": {"'9s'", "'10s'", "9s"},
		"idle_session_timeout":                {"'9s'", "'10s'", "9s"},
		"transaction_timeout":                 {"'9s'", "'10s'", "9s"},
	} {
		if !query[bool](t, db, "select current_setting($1, true) is not null", name) {
			continue // transaction_timeout came with 17
		}
		set(t, db, map[string]string{name: test.short})
		wantFinding(t, examine(t, db, nil), "timeouts", statusWarning, name+" = "+test.shown+" (ALTER ROLE IN DATABASE)", name+" ends ", "raise "+name)
		set(t, db, map[string]string{name: test.long})
		wantFinding(t, examine(t, db, nil), "timeouts", statusOK, name+" = ")
	}
	set(t, db, nil)
	database := "alter database " + pgx.Identifier{db.Name}.Sanitize()
	db.Exec(t, database+" set lock_timeout = 1")
	db.Exec(t, database+" set statement_timeout = '1h'")
	wantFinding(t, examine(t, db, nil), "timeouts", statusWarning, "lock_timeout = 1ms (ALTER DATABASE)", "statement_timeout = 1h0m0s")
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
	t.Parallel()
	db := controlled(t, migrated(t))
	settings := together()
	for name, value := range map[string]string{ // shorter ones would end it before its own stand
		"statement_timeout": "'900ms'", "lock_timeout": "'900ms'", "idle_session_timeout": "'9s'", "idle_in_transaction_session_timeout": "'9s'",
	} {
		settings[name] = value
	}
	set(t, db, settings)
	findings := examine(t, db, nil)
	wantFinding(t, findings, "primary", statusWarning, "default_transaction_read_only = on", "25006", "READ WRITE")
	wantFinding(t, findings, "timeouts", statusWarning)
	wantFinding(t, findings, "durability", statusError, "fsync = off", "synchronous_commit = off", "with the claims")
	wantRestOK(t, findings, "primary", "timeouts", "durability", "lock_table") // others fill it
	if len(findings) != len(doctorChecks) {
		t.Errorf("%d findings", len(findings))
	}
}

func TestDoctorFindsWhatACrashWouldCost(t *testing.T) {
	t.Parallel()
	_, db := privateServer(t, map[string]string{"fsync": "on", "full_page_writes": "off"})
	wantFinding(t, examine(t, db, nil), "durability", statusWarning, "full_page_writes = off (the server's configuration)", "half written")
	wantFinding(t, examine(t, migrated(t), nil), "durability", statusError, "set fsync = on")
}

func TestDoctorFindsALockTableThatFillsUp(t *testing.T) {
	t.Parallel()
	_, db := privateServer(t, map[string]string{"max_locks_per_transaction": "10", "max_connections": "20", "fsync": "on"})
	wantRestOK(t, examine(t, db, nil))
	filler := db.Connect(t)
	for _, test := range []struct {
		locks int
		want  pgxlock.Status
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
	wantFinding(t, examine(t, db, nil), "prepared", statusWarning, "'it''s' was prepared", "holds 1 locks", "ROLLBACK PREPARED 'it''s'")
	db.Exec(t, "rollback prepared 'it''s'")
	prepare("lock table distributed_locks in row exclusive mode", "table")
	findings := examine(t, db, nil)
	wantFinding(t, findings, "prepared", statusWarning, "'table' was prepared", "holds 1 locks")
	wantRestOK(t, findings, "prepared")
	db.Exec(t, "rollback prepared 'table'")
	wantRestOK(t, examine(t, db, nil))
}

func TestDoctorFindsTransactionsThatHoldBackVacuum(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	atOnce := &pgxlock.DoctorConfig{LongTransaction: 1}
	wantFinding(t, examine(t, db, atOnce), "snapshots", statusOK)
	for name, statement := range map[string]string{"reads": "select count(*) from pg_class", "writes": "create table t ()"} {
		conn := pgtest.Connect(t, db.URL)
		for _, sql := range []string{"set application_name = '" + name + "'", "begin isolation level repeatable read", statement} {
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

func TestWhatWasFoundBeforeTheEndIsReturned(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	for name, test := range map[string]struct {
		end  func(ctx context.Context, second *pgx.Conn, first uint32, cancel func()) error
		want error // nil: whatever the connection's end is
	}{
		"the context ends": {
			end: func(ctx context.Context, _ *pgx.Conn, _ uint32, cancel func()) error {
				cancel()
				return ctx.Err()
			},
			want: context.Canceled,
		},
		"the connection ends": {
			end: func(ctx context.Context, second *pgx.Conn, first uint32, _ func()) error {
				var ended bool
				err := second.QueryRow(ctx, "select pg_terminate_backend($1, 20000)", int32(first)).Scan(&ended)
				if err == nil && !ended {
					err = errors.New("it lives")
				}
				return err
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var first atomic.Uint32
			pool := db.NewPool(t, func(c *pgxpool.Config) {
				c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
					if first.CompareAndSwap(0, conn.PgConn().PID()) {
						return nil
					}
					return test.end(ctx, conn, first.Load(), cancel) // of the check "notify"
				}
			})
			findings, err := pgxlock.Doctor(ctx, pool, nil)
			if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Op != "doctor" || test.want != nil && !errors.Is(err, test.want) {
				t.Errorf("%v, want an *Error of doctor that is %v", err, test.want)
			}
			if len(findings) != 3 || findings[2].Check != "advisory" || findings[2].Status != statusOK {
				t.Errorf("%+v", findings)
			}
		})
	}

	findings, err := pgxlock.Doctor(t.Context(), pgtest.Pool(t, "postgres://nobody@127.0.0.1:1/nowhere"), nil)
	if _, ok := errors.AsType[*pgconn.ConnectError](err); !ok || findings != nil {
		t.Errorf("%v, %v", findings, err)
	}
}

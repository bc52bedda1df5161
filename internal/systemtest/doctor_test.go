package systemtest_test

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// What Doctor finds on the way to a server, and what becomes of what it found. Each
// check has a place here, in doctor_server_test.go or in doctor_schema_test.go where
// it is not content.

// doctorChecks are the names of all checks, in order.
var doctorChecks = strings.Fields(`primary pooler advisory notify schema nodes rights escalation search_path table_locks tokens row_security collation expired claims runs
	clock timeouts connections durability lock_table prepared snapshots wraparound`)

// examine returns the findings by their checks.
func examine(t *testing.T, db *pgtest.DB, cfg *doctor.Config) map[string]doctor.Finding {
	t.Helper()
	findings, err := doctor.Check(t.Context(), db.Pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	byCheck := make(map[string]doctor.Finding)
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
func wantFinding(t *testing.T, findings map[string]doctor.Finding, check string, want doctor.Status, words ...string) {
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

// wantRestOK checks that nothing else was found, but that the tests install as a superuser.
func wantRestOK(t *testing.T, findings map[string]doctor.Finding, but ...string) {
	t.Helper()
	for check := range maps.Keys(findings) {
		if !slices.Contains(but, check) && findings[check].Detail != ownedBySuperuser(t, findings) {
			wantFinding(t, findings, check, statusOK)
		}
	}
}

// ownedBySuperuser returns what the doctor says of that alone.
func ownedBySuperuser(t *testing.T, findings map[string]doctor.Finding) string {
	t.Helper()
	_, says, _ := strings.Cut(findings["escalation"].Detail, "superuser ")
	name, _, _ := strings.Cut(says, ":")
	return "pgxlock belongs to the superuser " + name + ": code that got the owner's rights would be a superuser's"
}

const statusOK, statusWarning, statusError = doctor.StatusOK, doctor.StatusWarning, doctor.StatusError

// safe are settings of a server that keeps what it was told.
var safe = map[string]string{"fsync": "on", "max_prepared_transactions": "5"}

func TestSoundServerHasEveryCheckAndNothingToDo(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	url := pgtest.Private(t, pgserver.Config{Settings: safe}).URL("postgres")
	admin := &pgtest.DB{Pool: pgtest.Pool(t, url), URL: url, Name: "postgres"}
	owner, db := ownedBy(t, admin, "locks")
	admin.Exec(t, "grant pg_monitor to "+owner)
	for range 2 { // it leaves nothing that it would find
		findings, err := doctor.Check(t.Context(), db.Pool, &doctor.Config{Schema: "locks"})
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
	pgtest.Until(t, "its connections are gone", func() bool {
		return testkit.Query[int](t, db, "select count(*) from pg_stat_activity where application_name = 'pgxlock doctor'") == 0
	})
	if n := testkit.AdvisoryCount(t, db); n != 0 {
		t.Errorf("%d advisory locks are left", n)
	}
}

func TestEachCheckIsInTheDocumentation(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/doctor.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, check := range doctorChecks {
		if !strings.Contains(string(text), "\n| `"+check+"` | ") {
			t.Errorf("docs/doctor.md does not say what %s means", check)
		}
	}
}

func TestDoctorRefusesBadArguments(t *testing.T) {
	t.Parallel()
	for says, call := range map[string]func() error{
		"the pool is nil": func() error { _, err := doctor.Check(t.Context(), nil, nil); return err },
		"doctor.Config.Schema": func() error {
			_, err := doctor.Check(t.Context(), unconnected(t), &doctor.Config{Schema: "pg_x"})
			return err
		},
		"doctor.Config.LongTransaction is -1s": func() error {
			_, err := doctor.Check(t.Context(), unconnected(t), &doctor.Config{LongTransaction: -time.Second})
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
	pgtest.Long(t)
	t.Parallel()
	server, primary := privateServer(t, safe)
	standby := pgtest.Standby(t, server, pgserver.Config{})
	findings := examine(t, testkit.On(t, "", standby), nil)
	wantFinding(t, findings, "primary", statusError, "standby", "connect to the primary")
	if len(findings) != 1 {
		t.Errorf("%v", findings)
	}
	// Of several hosts it takes that which Lockers take.
	several := testkit.On(t, "", standby, server)
	pgtest.Until(t, "nothing but the standby streams", func() bool { // what made it may just be leaving
		return testkit.Query[int](t, primary, "select count(*) from pg_stat_replication") == 1
	})
	findings = examine(t, several, nil)
	wantFinding(t, findings, "durability", statusWarning, "1 standby, none synchronous", "synchronous_standby_names")
	wantRestOK(t, findings, "durability")

	// A role that cannot see which standbys are synchronous is told so.
	_, plain := login(t, primary)
	primary.Exec(t, "alter system set synchronous_standby_names = '*'")
	primary.Exec(t, "select pg_reload_conf()")
	t.Cleanup(func() { // for what is committed after the test
		for _, sql := range []string{"alter system reset synchronous_standby_names", "select pg_reload_conf()"} {
			if _, err := primary.Pool.Exec(context.Background(), sql); err != nil {
				t.Error(err)
			}
		}
	})
	var durability doctor.Finding
	looksNow := func(db *pgtest.DB, status doctor.Status, says string) func() bool {
		return func() bool {
			durability = examine(t, db, nil)["durability"]
			return durability.Status == status && strings.Contains(durability.Detail, says)
		}
	}
	pgtest.Until(t, "the standby is synchronous", looksNow(primary, statusOK, "a failover to a synchronous standby"))
	pgtest.Until(t, "and it may not be told", looksNow(plain, doctor.StatusSkipped, "may not see whether a synchronous standby"))
	if !strings.Contains(durability.Advice, "pg_read_all_stats") {
		t.Error(durability)
	}
	if err := standby.Kill(); err != nil {
		t.Fatal(err)
	}
	pgtest.Until(t, "commits wait for ever", looksNow(primary, statusError, "no synchronous standby is connected"))
	pgtest.Until(t, "that much everybody may know", looksNow(plain, statusError, "no synchronous standby is connected"))
}

func TestDoctorTellsThePoolersModeAndLeavesNothingBehind(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	behindPoolers(t, nil, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		findings := examine(t, &pgtest.DB{Pool: pgtest.Pool(t, pooler.URL("postgres"))}, nil)
		wantFinding(t, findings, "notify", statusWarning, "do not LISTEN through a pooler", "polling")
		switch mode {
		case "session":
			wantFinding(t, findings, "pooler", statusOK, "session mode", "AdvisoryConfig.SessionPooler")
			wantFinding(t, findings, "advisory", statusOK)
		case "transaction":
			wantFinding(t, findings, "pooler", statusWarning, "transaction mode", "ClaimTx work", "NewLeaseLocker")
			wantFinding(t, findings, "advisory", statusWarning, "not checked", "the server itself")
		case "statement":
			wantFinding(t, findings, "pooler", statusWarning, "statement mode", "so is every transaction", "NewLeaseLocker")
			wantFinding(t, findings, "advisory", statusWarning, "not checked", "the server itself")
		}
		wantRestOK(t, findings, "notify", "pooler", "advisory", "durability") // fsync is off
	})
}

// Where others use the pooler's connections as well, two of ours may get one each.
func TestDoctorIsNotDeceivedByTrafficThroughAPooler(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, _ := privateServer(t, safe)
	pgtest.EachPooler(t, server, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		if mode != "transaction" {
			return
		}
		other := pgtest.Connect(t, pooler.URL("postgres"))
		var busy, connections atomic.Int32
		pool := pgtest.Pool(t, pooler.URL("postgres"), func(c *pgxpool.Config) {
			c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				if connections.Add(1) != 2 {
					return nil
				}
				// What the first one had last is what the pooler gives away first.
				if _, err := other.Exec(ctx, "begin"); err != nil {
					return err
				}
				var pid int32
				err := other.QueryRow(ctx, "select pg_backend_pid()", pgx.QueryExecModeSimpleProtocol).Scan(&pid)
				busy.Store(pid)
				return err
			}
		})
		findings := examine(t, &pgtest.DB{Pool: pool}, nil)
		wantFinding(t, findings, "pooler", statusWarning, "transaction mode")
		wantRestOK(t, findings, "pooler", "advisory", "notify")
		if busy.Load() == 0 {
			t.Error("there was no traffic")
		}
	})
}

func TestDoctorReturnsFindingsBeforeItsEnd(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
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
			findings, err := doctor.Check(ctx, pool, nil)
			if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Op != "doctor" || test.want != nil && !errors.Is(err, test.want) {
				t.Errorf("%v, want an *Error of doctor that is %v", err, test.want)
			}
			if len(findings) != 3 || findings[2].Check != "advisory" || findings[2].Status != statusOK {
				t.Errorf("%+v", findings)
			}
		})
	}

	findings, err := doctor.Check(t.Context(), pgtest.Pool(t, "postgres://nobody@127.0.0.1:1/nowhere"), nil)
	if _, ok := errors.AsType[*pgconn.ConnectError](err); !ok || findings != nil {
		t.Errorf("%v, %v", findings, err)
	}
}

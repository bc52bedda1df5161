package stacks_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jmoiron/sqlx"
	"github.com/lib/pq"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/examples/stacks"
	"github.com/pgxlock/pgxlock/migrations"
)

// plainID is the event, and the order, in plain.sql.
const plainID = 42

var lastID atomic.Int64

// newID is an event or an order that no other test has.
func newID() int64 { return plainID + lastID.Add(1) }

// booker books a seat by one of the stacks.
type booker func(ctx context.Context, event int64, guest string) error

func bookers(t *testing.T) map[string]booker {
	t.Helper()
	all := make(map[string]booker)
	for _, d := range drivers {
		db := d.open(t)
		dbx := sqlx.NewDb(db, d.name)
		orm := openGORM(t, db, &gorm.Config{})
		prepared := openGORM(t, db, &gorm.Config{PrepareStmt: true})
		dbBun, dbEnt := bun.NewDB(db, pgdialect.New()), entsql.OpenDB(dialect.Postgres, db)
		for name, book := range map[string]booker{
			"database/sql": func(ctx context.Context, event int64, guest string) error {
				return stacks.BookWithSQL(ctx, db, event, guest)
			},
			"database/sql alone": func(ctx context.Context, event int64, guest string) error {
				return stacks.BookWithSQLAlone(ctx, db, event, guest)
			},
			"sqlx": func(ctx context.Context, event int64, guest string) error {
				return stacks.BookWithSQLX(ctx, dbx, event, guest)
			},
			"sqlc": func(ctx context.Context, event int64, guest string) error {
				return stacks.BookWithSQLC(ctx, db, event, guest)
			},
			"bun": func(ctx context.Context, event int64, guest string) error {
				return stacks.BookWithBun(ctx, dbBun, event, guest)
			},
			"ent": func(ctx context.Context, event int64, guest string) error {
				return stacks.BookWithEnt(ctx, dbEnt, event, guest)
			},
			"GORM": func(ctx context.Context, event int64, guest string) error {
				return stacks.BookWithGORM(ctx, orm, event, guest)
			},
			"GORM that prepares": func(ctx context.Context, event int64, guest string) error {
				return stacks.BookWithGORM(ctx, prepared, event, guest)
			},
			"GORM alone": func(ctx context.Context, event int64, guest string) error {
				return stacks.BookWithGORMAlone(ctx, orm, event, guest)
			},
			"GORM alone that prepares": func(ctx context.Context, event int64, guest string) error {
				return stacks.BookWithGORMAlone(ctx, prepared, event, guest)
			},
		} {
			all[name+", "+d.title] = book
		}
	}
	return all
}

func openGORM(t *testing.T, db *sql.DB, config *gorm.Config) *gorm.DB {
	t.Helper()
	config.Logger = logger.Discard
	orm, err := gorm.Open(postgres.New(postgres.Config{Conn: db}), config)
	if err != nil {
		t.Fatal(err)
	}
	return orm
}

// rush has all of them book at a time, for twice as many guests as there are
// seats, and wants each seat to be booked once.
func rush(t *testing.T, all map[string]booker) {
	t.Helper()
	event := newID()
	var booked atomic.Int32
	var guests sync.WaitGroup
	for name, book := range all {
		for i := range (2*stacks.Seats + len(all) - 1) / len(all) {
			guests.Go(func() {
				err := book(t.Context(), event, fmt.Sprint(name, i))
				if err == nil {
					booked.Add(1)
				} else if !errors.Is(err, stacks.ErrFull) {
					t.Errorf("%s: %v", name, err)
				}
			})
		}
	}
	guests.Wait()
	if inTable := bookings(t, event); booked.Load() != stacks.Seats || inTable != stacks.Seats {
		t.Errorf("%d were told that they have a seat, %d have one; there are %d", booked.Load(), inTable, stacks.Seats)
	}
}

func bookings(t *testing.T, event int64) (n int) {
	t.Helper()
	if err := database.pool.QueryRow(t.Context(), "SELECT count(*) FROM bookings WHERE event = $1", event).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestStacksDoNotOverbook(t *testing.T) {
	t.Parallel()
	for name, book := range bookers(t) {
		t.Run(name, func(t *testing.T) { rush(t, map[string]booker{name: book}) })
	}
}

func TestStacksExcludeEachOther(t *testing.T) {
	t.Parallel()
	rush(t, bookers(t))
}

// Each stack counts after it has got the lock, and so sees what its previous
// holder has booked.
func TestWaitersForTheLastSeatsFindThemTaken(t *testing.T) {
	t.Parallel()
	for name, book := range bookers(t) {
		t.Run(name, func(t *testing.T) {
			for try := 1; ; try++ {
				err := bookLastSeats(t, book)
				if errors.Is(err, stacks.ErrFull) {
					return
				}
				// Each booker waits for 2 s, which is less than a busy machine may stand still.
				if busy := errors.Is(err, pgxlock.ErrNotAcquired) || errors.Is(err, stacks.ErrBusy); !busy || try == 10 {
					t.Fatalf("got %v, want ErrFull", err)
				}
			}
		})
	}
}

// bookLastSeats returns the error of a booker that waits while another one books all seats, or
// that had waited for as long as it does before it was seen to.
func bookLastSeats(t *testing.T, book func(ctx context.Context, event int64, guest string) error) error {
	t.Helper()
	event := newID()
	key := fmt.Sprintf("event:%d", event)
	holder, err := database.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Rollback(context.Background())
	if err := pgxlock.LockTx(t.Context(), holder, key); err != nil {
		t.Fatal(err)
	}
	_, err = holder.Exec(t.Context(), "INSERT INTO bookings (event, guest) SELECT $1, 'a group' FROM generate_series(1, $2)", event, stacks.Seats)
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() { got <- book(t.Context(), event, "too late") }()
	for waits := false; !waits; {
		select {
		case err := <-got:
			return err
		default:
		}
		err := database.pool.QueryRow(t.Context(), `SELECT count(*) = 1 FROM pg_locks
			WHERE locktype = 'advisory' AND NOT granted AND (classid::bigint << 32) | objid::bigint = $1`, pgxlock.AdvisoryID(key)).Scan(&waits)
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := holder.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	return <-got
}

func TestEachStackSaysThatAnEventIsBusy(t *testing.T) {
	t.Parallel()
	event := newID()
	holder, err := database.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { holder.Rollback(context.Background()) })
	if err := pgxlock.LockTx(t.Context(), holder, fmt.Sprintf("event:%d", event)); err != nil {
		t.Fatal(err)
	}
	var guests sync.WaitGroup
	for name, book := range bookers(t) {
		guests.Go(func() {
			if err := book(t.Context(), event, name); !errors.Is(err, pgxlock.ErrNotAcquired) && !errors.Is(err, stacks.ErrBusy) {
				t.Errorf("%s: got %v", name, err)
			}
		})
	}
	guests.Wait()
	if n := bookings(t, event); n != 0 {
		t.Errorf("%d booked", n)
	}
}

// A library's transaction takes what a *sql.Tx takes, and gives the same answers: texts that the
// library rewrites arrive as they are.
func TestEachLibrarysTransactionLocksClaimsAndFences(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db, locks := d.openBoth(t)
		for name, begin := range map[string]func() (pgxlock.SQLTx, error){
			"sqlx": func() (pgxlock.SQLTx, error) { return sqlx.NewDb(db, d.name).BeginTxx(t.Context(), nil) },
			"bun": func() (pgxlock.SQLTx, error) {
				return bun.NewDB(db, pgdialect.New()).WithNamedArg("tenant", "x'").BeginTx(t.Context(), nil)
			},
			"bun, hidden": func() (pgxlock.SQLTx, error) {
				tx, err := bun.NewDB(db, pgdialect.New()).WithNamedArg("tenant", "x'").BeginTx(t.Context(), nil)
				return struct{ pgxlock.SQLTx }{tx}, err
			},
			"ent": func() (pgxlock.SQLTx, error) {
				return stacks.BeginEnt(t.Context(), entsql.OpenDB(dialect.Postgres, db))
			},
			"ent's own": func() (pgxlock.SQLTx, error) {
				tx, err := entsql.OpenDB(dialect.Postgres, db).Tx(t.Context())
				return tx.(*entsql.Tx), err
			},
			"GORM": func() (pgxlock.SQLTx, error) {
				return openGORM(t, db, &gorm.Config{}).Begin().Statement.ConnPool.(pgxlock.SQLTx), nil
			},
			"GORM that prepares": func() (pgxlock.SQLTx, error) {
				return openGORM(t, db, &gorm.Config{PrepareStmt: true}).Begin().Statement.ConnPool.(pgxlock.SQLTx), nil
			},
		} {
			t.Run(name, func(t *testing.T) {
				key := fmt.Sprintf("%s %d o'key ?tenant ? \\?0 $1 $$ %%s :name @name \\' 世界 \n-- ", name, newID())
				start := func() pgxlock.SQLTx {
					tx, err := begin()
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { _ = tx.Rollback() })
					return tx
				}
				lock, err := locks.Acquire(t.Context(), key)
				if err != nil {
					t.Fatal(err)
				}
				holder, other := start(), start()
				first, err := pgxlock.ClaimSQLTx(t.Context(), holder, key, pgxlock.Retention(time.Hour))
				if err != nil || !first {
					t.Fatal(first, err)
				}
				answers := func(tx pgxlock.SQLTx, calls bool) {
					t.Helper()
					called := false
					answer, err := pgxlock.AnswerSQLTx(t.Context(), tx, key+"asked", []byte(key), func() ([]byte, error) {
						called = true
						return []byte(key + "\x00\xff"), nil
					})
					if err != nil || string(answer) != key+"\x00\xff" || called != calls {
						t.Errorf("%q, %v; fn was called: %t, want %t", answer, err, called, calls)
					}
				}
				answers(holder, true)
				err = errors.Join(pgxlock.LockSQLTx(t.Context(), holder, key, aMoment), lock.FenceSQL(t.Context(), holder), pgxlock.LockAllSQLTx(t.Context(), holder, []string{key, key + "?"}))
				if err != nil {
					t.Fatal(err)
				}
				for _, wait := range []pgxlock.MaxWait{pgxlock.NoWait, aMoment} {
					if err := pgxlock.LockSQLTx(t.Context(), other, key, wait); !errors.Is(err, pgxlock.ErrNotAcquired) {
						t.Errorf("another one: %v, want ErrNotAcquired", err)
					}
				}
				var claimed bool
				if err := holder.Commit(); err != nil {
					t.Fatal(err)
				}
				if err := database.pool.QueryRow(t.Context(), "SELECT count(*) = 1 FROM pgxlock_claims WHERE claim_key = $1", key).Scan(&claimed); err != nil || !claimed {
					t.Errorf("the key is claimed: %t, %v", claimed, err)
				}
				if first, err := pgxlock.ClaimSQLTx(t.Context(), other, key); err != nil || first {
					t.Errorf("a second claim: %t, %v", first, err)
				}
				answers(other, false)
				if err := errors.Join(other.Rollback(), lock.Release(t.Context())); err != nil {
					t.Fatal(err)
				}
				if err := pgxlock.LockSQLTx(t.Context(), other, key); !errors.Is(err, sql.ErrTxDone) {
					t.Errorf("after its end: %v, want sql.ErrTxDone", err)
				}
			})
		}
	})
}

func TestOrderIsShippedOnce(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db, order := d.open(t), newID()
		var shipped atomic.Int32
		var deliveries sync.WaitGroup
		for range 8 {
			deliveries.Go(func() {
				first, err := stacks.ShipOnce(t.Context(), db, order)
				if err != nil {
					t.Error(err)
				} else if first {
					shipped.Add(1)
				}
			})
		}
		deliveries.Wait()
		if n := get[int](t, db, "SELECT count(*) FROM shipments WHERE order_id = $1", order); n != 1 || shipped.Load() != 1 {
			t.Errorf("%d deliveries shipped, and there are %d shipments", shipped.Load(), n)
		}
	})
}

func TestClaimThatIsNotDecidedIsNullWithoutAWait(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		const claim = "SELECT claim_once($1, '0')"
		db, key := d.open(t), fmt.Sprint("claim:", newID())
		first, second := readCommitted(t, db), readCommitted(t, db)
		if got := get[sql.NullBool](t, first, claim, key); !got.Bool {
			t.Fatalf("got %v, want true", got)
		}
		if got := get[sql.NullBool](t, second, claim, key); got.Valid {
			t.Errorf("got %v, want NULL", got)
		}
		if err := first.Commit(); err != nil {
			t.Fatal(err)
		}
		if got := get[sql.NullBool](t, second, claim, key); !got.Valid || got.Bool {
			t.Errorf("got %v, want false", got)
		}
	})
}

// newDay is a day that no other test has.
func newDay() time.Time { return time.Date(2026, 1, int(newID()), 0, 0, 0, 0, time.UTC) }

// openBoth opens the database and a Locker, closed when the test is over.
func (d driver) openBoth(t *testing.T) (*sql.DB, *pgxlock.Locker) {
	t.Helper()
	locks, err := stacks.LockerBeside(t.Context(), database.url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := locks.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	connString := database.url
	if d.name == "postgres" { // a mode of lib/pq that changes how arguments are sent
		if connString, err = with(connString, "binary_parameters", "yes"); err != nil {
			t.Fatal(err)
		}
	}
	return d.openURL(t, connString), locks
}

func TestSettlementUnderALeaseIsWritten(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db, locks := d.openBoth(t)
		day := newDay()
		err := stacks.SettleFenced(t.Context(), db, locks, day, func(context.Context) (int64, error) { return 100, nil })
		if err != nil {
			t.Fatal(err)
		}
		if total := get[int](t, db, "SELECT sum(total) FROM settlements WHERE day = $1", day); total != 100 {
			t.Errorf("%d is written", total)
		}
	})
}

func TestSettlementInOneCallIsWritten(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db, locks := d.openBoth(t)
		day := newDay()
		if err := stacks.SettleWithBun(t.Context(), bun.NewDB(db, pgdialect.New()), locks, day, 100); err != nil {
			t.Fatal(err)
		}
		if total := get[int](t, db, "SELECT sum(total) FROM settlements WHERE day = $1", day); total != 100 {
			t.Errorf("%d is written", total)
		}
	})
}

func TestSettlementThatLostItsLeaseIsNotWritten(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db, locks := d.openBoth(t)
		day := newDay()
		key := "settle:" + day.Format(time.DateOnly)
		err := stacks.SettleFenced(t.Context(), db, locks, day, func(context.Context) (int64, error) {
			// So slow that the lease has run out, and somebody else has taken it.
			exec(t, db, "UPDATE distributed_locks SET expires_at = clock_timestamp() - interval '1 second' WHERE lock_name = $1", key)
			if !get[bool](t, db, "SELECT acquire_lock($1, 'somebody else')", key) {
				t.Error("the lease was not taken over")
			}
			return 100, nil
		})
		if state := sqlState(err); state != "LK001" || !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("got %q: %v", state, err)
		}
		if n := get[int](t, db, "SELECT count(*) FROM settlements WHERE day = $1", day); n != 0 {
			t.Error("it is written")
		}
	})
}

func TestMigrationsComeThroughDatabaseSQL(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db, schema := d.open(t), "up_"+strings.ToLower(rand.Text())
		t.Cleanup(func() { exec(t, db, "DROP SCHEMA "+schema+" CASCADE") })
		for _, standard := range []string{"off", "on"} { // the second time there is nothing to do
			connString, err := with(database.url, "standard_conforming_strings", standard)
			if err != nil {
				t.Fatal(err)
			}
			if err := migrations.UpSQL(t.Context(), d.openURL(t, connString), &migrations.Config{Schema: schema}); err != nil {
				t.Fatal(err)
			}
			status, err := migrations.Version(t.Context(), database.pool, &migrations.Config{Schema: schema})
			if err != nil || status.Installed != status.Newest {
				t.Errorf("%+v: %v", status, err)
			}
		}
		if err := migrations.UpSQL(t.Context(), db, nil); err != nil { // finds what the search_path names
			t.Error(err)
		}
		tx := readCommitted(t, db)
		if first, err := pgxlock.ClaimSQLTx(t.Context(), tx, "k", pgxlock.Schema(schema)); err != nil || !first {
			t.Errorf("a claim in what was installed: %t, %v", first, err)
		}
		goesOn(t, tx)
		exec(t, db, "DELETE FROM "+schema+".pgxlock_claims; DROP VIEW "+schema+".lock_holders CASCADE")
		var damage *migrations.DamageError
		if _, err := migrations.Version(t.Context(), database.pool, &migrations.Config{Schema: schema}); !errors.As(err, &damage) {
			t.Errorf("%v, want a DamageError", err)
		}
		if err := migrations.UpSQL(t.Context(), db, &migrations.Config{Schema: schema}); err != nil {
			t.Errorf("what was dropped: %v", err)
		}
		if err := migrations.UpSQL(t.Context(), nil, nil); err == nil || !strings.Contains(err.Error(), "db is nil") {
			t.Errorf("nil: %v", err)
		}
	})
}

// docs/database-sql.md lists these words. They are right for lib/pq, and pgx takes them for
// settings of the server.
func TestWordsThatOnlyLibPQKnowsAreRefusedByTheServer(t *testing.T) {
	t.Parallel()
	for word, value := range map[string]string{
		"binary_parameters":              "yes",
		"disable_prepared_binary_result": "yes",
		"fallback_application_name":      "billing",
		"hostaddr":                       "127.0.0.1",
		"load_balance_hosts":             "random",
		"ssl_max_protocol_version":       "TLSv1.3",
		"ssl_min_protocol_version":       "TLSv1.2",
		"sslinline":                      "true",
		"tz":                             "UTC",
	} {
		t.Run(word, func(t *testing.T) {
			t.Parallel()
			connString, err := with(database.url, word, value)
			if err != nil {
				t.Fatal(err)
			}
			config, err := pq.NewConfig(connString)
			if _, sent := config.Runtime[word]; err != nil || sent {
				t.Errorf("lib/pq does not know it: %v", err)
			}
			locks, err := stacks.LockerBeside(t.Context(), connString)
			if err != nil {
				t.Fatal(err)
			}
			defer locks.Close(context.Background())
			_, err = locks.TryAcquire(t.Context(), t.Name())
			if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || !strings.Contains(pgErr.Message, word) || errors.Is(err, pgxlock.ErrUnavailable) {
				t.Errorf("got %v, want an error of the server that names %s, and not ErrUnavailable", err, word)
			}
		})
	}
}

// A claim that is not decided is an error in Go, not a NULL.
func TestClaimThatIsNotDecidedIsRefused(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db, key := d.open(t), fmt.Sprint("claim:", newID())
		first, second := readCommitted(t, db), readCommitted(t, db)
		claim := func(tx *sql.Tx, want bool, opts ...pgxlock.ClaimTxOption) {
			t.Helper()
			if got, err := pgxlock.ClaimSQLTx(t.Context(), tx, key, opts...); err != nil || got != want {
				t.Fatalf("got %v, %v, want %v", got, err, want)
			}
		}
		claim(first, true, pgxlock.Retention(time.Hour), aMoment)
		for _, wait := range []pgxlock.ClaimTxOption{pgxlock.NoWait, aMoment} {
			if _, err := pgxlock.ClaimSQLTx(t.Context(), second, key, wait); !errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("got %v, want ErrNotAcquired", err)
			}
		}
		waiting := pid(t, second)
		decided := make(chan error, 1)
		go func() {
			got, err := pgxlock.ClaimSQLTx(t.Context(), second, key)
			if got {
				err = errors.New("both are the first")
			}
			decided <- err
		}()
		waits(t, waiting)
		if err := first.Commit(); err != nil {
			t.Fatal(err)
		}
		if err := <-decided; err != nil {
			t.Error(err)
		}
		goesOn(t, second)
	})
}

func TestContextThatEndsAClaimIsTold(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		db, key := d.open(t), fmt.Sprint("claim:", newID())
		first, second := readCommitted(t, db), readCommitted(t, db)
		if _, err := pgxlock.ClaimSQLTx(t.Context(), first, key); err != nil {
			t.Fatal(err)
		}
		waiting := pid(t, second)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			_, err := pgxlock.ClaimSQLTx(ctx, second, key)
			ended <- err
		}()
		waits(t, waiting)
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want Canceled", err)
		}
	})
}

//go:embed plain.sql
var plainSQL string

func TestPlainSQLBooksAndShips(t *testing.T) {
	t.Parallel()
	conn, err := database.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	const forget = "DELETE FROM bookings WHERE event = 42; DELETE FROM shipments WHERE order_id = 42; DELETE FROM pgxlock_claims WHERE claim_key = 'order:42:ship';"
	if _, err := conn.Exec(t.Context(), forget+plainSQL); err != nil { // in a database that an earlier run has used, too
		t.Fatal(err)
	}
	if n := bookings(t, plainID); n != 2 {
		t.Errorf("%d seats are booked, want 2", n)
	}

	book := func(q interface {
		QueryRow(context.Context, string, ...any) pgx.Row
	}, want string,
	) {
		t.Helper()
		var said string
		if err := q.QueryRow(t.Context(), "SELECT book($1, 'carol')", plainID).Scan(&said); err != nil {
			t.Fatal(err)
		}
		if said != want {
			t.Errorf("it says %q, want %q", said, want)
		}
	}
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	for range stacks.Seats - 2 {
		book(tx, "booked")
	}
	book(database.pool, "busy")
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	book(database.pool, "full")

	tag, err := database.pool.Exec(t.Context(), "INSERT INTO shipments (order_id) SELECT 42 WHERE claim_once('order:42:ship')")
	if err != nil {
		t.Fatal(err)
	}
	if tag.RowsAffected() != 0 {
		t.Error("the order was shipped twice")
	}
}

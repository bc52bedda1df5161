//go:build unix

package systemtest_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/internal/waitqueue"
)

// hotKeys are the keys that useHotKeys locks, each in its own way. The semaphore's permits are jobs#1
// and jobs#2.
var hotKeys = []string{"lease", "shared", "jobs", "advisory"}

// useHotKeys has callers acquire each of hotKeys all the time, after the child was told to begin and
// until it is told to end. In each of its turns a caller adds a row to turns, with the child's number,
// and with whether its key's counter stayed the same meanwhile. Writers also raise the number that
// they read in the counter: where two do so at once, it ends below the number of their turns.
//
// Children of later versions run beside it: it is built from the commit that brings the protocol.
func useHotKeys(ctx context.Context, url, number string, report func(any) error) error {
	process, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	leases, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: 5 * time.Second})
	if err != nil {
		return err
	}
	advisory, err := pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{Tokens: true})
	if err != nil {
		return err
	}
	semaphore, err := leases.Semaphore(2)
	if err != nil {
		return err
	}
	turn := func(shared bool) func(context.Context, *pgxlock.Lock) error {
		return func(ctx context.Context, lock *pgxlock.Lock) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				if err := lock.Fence(ctx, tx); err != nil {
					return err
				}
				var before, after int
				const counter = "select n from counters where key = $1"
				err := errors.Join(tx.QueryRow(ctx, counter, lock.Key()).Scan(&before), tx.QueryRow(ctx, counter, lock.Key()).Scan(&after))
				if err == nil && !shared {
					_, err = tx.Exec(ctx, "update counters set n = $2 where key = $1", lock.Key(), before+1)
				}
				if err == nil {
					_, err = tx.Exec(ctx, "insert into turns (key, process, shared, alone) values ($1, $2, $3, $4)", lock.Key(), process, shared, before == after)
				}
				return err
			})
		}
	}
	calls := map[string]func(context.Context) error{
		"lease":    func(ctx context.Context) error { return leases.Do(ctx, "lease", turn(false)) },
		"writer":   func(ctx context.Context) error { return leases.Do(ctx, "shared", turn(false)) },
		"reader":   func(ctx context.Context) error { return leases.Do(ctx, "shared", turn(true), pgxlock.Shared) },
		"permit":   func(ctx context.Context) error { return semaphore.Do(ctx, "jobs", turn(false)) },
		"advisory": func(ctx context.Context) error { return advisory.Do(ctx, "advisory", turn(false)) },
	}
	// A process that listens later gets fewer turns at first.
	if err := errors.Join(testkit.HearOf(ctx, pool, leases), testkit.HearOf(ctx, pool, advisory)); err != nil {
		return err
	}
	using, end, err := workUntilTold(ctx, report)
	if err != nil {
		return err
	}
	defer end()
	var all sync.WaitGroup
	failed := make(chan error, 2*len(calls))
	for what, call := range calls {
		for range 2 {
			all.Go(func() {
				for using.Err() == nil {
					if err := call(ctx); err != nil && !errors.Is(err, pgxlock.ErrLost) { // a machine may stand still for a TTL
						failed <- fmt.Errorf("%s: %w", what, err)
						end()
					}
				}
			})
		}
	}
	all.Wait()
	close(failed)
	return errors.Join(<-failed, leases.Close(ctx), advisory.Close(ctx))
}

// protocolsEnv names the directory into which scripts/protocols builds this program as it was: for each
// protocol a file whose name begins with its number.
const protocolsEnv = "PGXLOCK_TEST_PROTOCOLS"

func TestLockersOfEachProtocolShareLocksWithThoseOfToday(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for number := range waitqueue.Protocol {
		t.Run(fmt.Sprint(number+1), func(t *testing.T) {
			dir := cmp.Or(os.Getenv(protocolsEnv), os.DevNull)
			programs, err := filepath.Glob(filepath.Join(dir, fmt.Sprint(number+1, "-*")))
			if err != nil {
				t.Fatal(err)
			}
			if len(programs) != 1 {
				pgtest.Missing(t, "history", fmt.Sprintf("%s names no directory with a Locker of this protocol, which make test-all builds from the history of git", protocolsEnv))
			}
			shareHotKeys(t, programs[0], os.Args[0])
		})
	}
}

// shareHotKeys has two processes of each program use the hot keys, and kills one of each.
func shareHotKeys(t *testing.T, old, today string) {
	t.Helper()
	programs := []string{old, old, today, today}
	db := testkit.Migrated(t)
	db.Exec(t, `create table counters (key text primary key, n integer not null default 0);
		insert into counters (key) values ('lease'), ('shared'), ('jobs#1'), ('jobs#2'), ('advisory');
		create table turns (id bigint generated always as identity, key text, process integer, shared boolean, alone boolean)`)
	var children []*child
	for i, program := range programs {
		children = append(children, startProgram(t, program, "use hot keys", db.URL, strconv.Itoa(i)))
	}
	for _, c := range children {
		var ready string
		c.report(t, &ready)
	}
	for _, c := range children {
		c.tell(t)
	}
	for _, key := range hotKeys {
		testkit.UntilFair(t, key, len(children), func() []byte {
			return testkit.Query[[]byte](t, db, "select coalesce(decode(string_agg(lpad(process::text, 2, '0'), '' order by id), 'hex'), '') from turns where split_part(key, '#', 1) = $1", key)
		})
	}

	survivors := []int{1, 2}
	for _, victim := range []int{0, 3} {
		children[victim].signal(t, syscall.SIGKILL)
		_ = children[victim].cmd.Wait()
	}
	last := testkit.Query[int](t, db, "select max(id) from turns")
	for _, key := range hotKeys {
		for _, survivor := range survivors {
			pgtest.Until(t, fmt.Sprintf("process %d has turns of %s after the others died", survivor, key), func() bool {
				return testkit.Query[bool](t, db, "select count(*) >= 10 from turns where id > $1 and split_part(key, '#', 1) = $2 and process = $3", last, key, survivor)
			})
		}
	}
	for _, survivor := range survivors {
		children[survivor].dismiss(t)
	}
	for _, survivor := range survivors {
		children[survivor].end(t)
	}
	if wrong := testkit.Query[string](t, db, `select coalesce(string_agg(concat_ws(' ', c.key, c.n, w.turns, w.alone), ', '), '') from counters c,
		lateral (select count(*) filter (where not t.shared) as turns, bool_and(t.alone) as alone from turns t where t.key = c.key) w
		where c.n <> w.turns or c.n = 0 or not w.alone`); wrong != "" {
		t.Errorf("holders came beside each other: a key, what they counted, their turns, and whether they were alone in each: %s", wrong)
	}
	db.Exec(t, "select pgxlock_reap_waiters()") // of those that died
	testkit.NoTickets(t, db)
}

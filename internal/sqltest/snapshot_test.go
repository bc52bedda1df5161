// Locks in transactions that keep their snapshot: PostgreSQL took it before the lock, so that
// it may hide what the previous holder wrote. The servers are private, with autovacuum off:
// only the test commits there.

package sqltest_test

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// quiet starts a server on which nothing commits but what the test commits.
func quiet(t *testing.T) *database {
	t.Helper()
	_, d := private(t, map[string]string{"fsync": "off", "max_prepared_transactions": "2"})
	d.do("create table work (id int)")
	return d
}

const (
	write     = "insert into work values (1)"
	writeInXX = "savepoint xx; insert into work values (1); release xx"
)

// between is what happens around a snapshot, in another session, and whether a
// lock that is granted then has to be refused for it. The other session has a
// transaction all the time.
var between = []struct {
	name          string
	before, after []string // statements before and after the snapshot
	stale         bool
}{
	{"nothing", nil, nil, false},
	{"a commit before it", []string{write, "commit"}, nil, false},
	{"a write that is open", []string{write}, nil, false},
	{"a write that began since and is open", nil, []string{write}, false},
	{"a commit of what was open", []string{write}, []string{"commit"}, true},
	{"a commit of what was open and wrote nothing after", []string{write, "savepoint s"}, []string{"rollback to s", "commit"}, true},
	{"a commit of what began since", nil, []string{write, "commit"}, true},
	{"a rollback of what was open", []string{write}, []string{"rollback"}, false},
	{"a rollback of what began since", nil, []string{write, "rollback"}, false},
	{"a commit that wrote nothing", nil, []string{"select from work", "commit"}, false},
	{"a commit after many rollbacks", nil, []string{write, "rollback", "begin", write, "rollback", "begin", write, "rollback", "begin", write, "commit"}, true},
	{"many rollbacks", nil, []string{write, "rollback", "begin", write, "rollback", "begin", write, "rollback"}, false},
	{"a commit and a rollback after it", nil, []string{write, "commit", "begin", write, "rollback"}, true},
	{"a commit of a savepoint's work that was open", []string{writeInXX}, []string{"commit"}, true},
	{"a savepoint's work that is open", []string{write, writeInXX}, []string{writeInXX}, false},
	{"a commit of what a savepoint began since", nil, []string{writeInXX, "commit"}, true},
	{"a commit whose savepoint was rolled back", nil, []string{"savepoint s", write, "rollback to s", "commit"}, true}, // it has an id, and could have written
	{"a rollback after a savepoint was kept", nil, []string{writeInXX, "rollback"}, false},
	{"a prepared transaction", []string{write}, []string{"prepare transaction 'p'"}, false},
	{"a prepared transaction from before", []string{write, "prepare transaction 'p'"}, nil, false},
	{"a prepared transaction that was committed", []string{write, "prepare transaction 'p'"}, []string{"commit prepared 'p'"}, true},
	{"a prepared transaction that was rolled back", []string{write, "prepare transaction 'p'"}, []string{"rollback prepared 'p'"}, false},
	{"a commit of more savepoints than a snapshot has room for", []string{strings.Repeat(writeInXX+";", 80)}, []string{"commit"}, true},
	{"more savepoints than a snapshot has room for", []string{strings.Repeat(writeInXX+";", 80)}, nil, false},
}

func TestLockIsRefusedExactlyIfSomethingWasCommittedSinceTheSnapshot(t *testing.T) {
	t.Parallel()
	d := (*database)(nil)
	if testing.Short() { // on a server on which others commit
		d = install(t)
		d.do("create table work (id int)")
	} else {
		d = quiet(t)
	}
	for _, level := range levels {
		for _, c := range between {
			if testing.Short() && (!c.stale || level != levels[1] || strings.Contains(fmt.Sprint(c.before, c.after), "prepare")) {
				continue
			}
			t.Run(level+", "+c.name, func(t *testing.T) {
				d := open(t, d.url)
				other, s := d.sessions()
				for _, call := range []string{"lock_tx('k')", "lock_tx('k', '0')", "lock_tx('k', '1 minute', true)"} {
					for _, v := range []struct {
						passed bool   // whether a later transaction ends first: the snapshot lists only what is open behind such a one
						own    string // what the transaction wrote itself
					}{{false, ""}, {true, ""}, {true, write + "; " + writeInXX + "; savepoint s; " + write + "; rollback to s"}} {
						other.do("begin")
						for _, sql := range c.before {
							other.do(sql)
						}
						if v.passed {
							d.do("select pg_current_xact_id()")
						}
						s.begin(level)
						if v.own != "" {
							s.do(v.own)
						}
						for _, sql := range c.after {
							other.do(sql)
						}
						s.do("savepoint before")
						want := "true"
						if c.stale && level != readCommitted {
							want = "LK002"
						}
						s.want(call, want)
						if want == "LK002" {
							s.do("rollback to before")
							if held := d.locks(s); held != "NULL" {
								t.Errorf("the refused lock is kept: %s", held)
							}
							s.want(strings.TrimSuffix(call, ")")+", p_allow_stale_snapshot => true)", "true")
						}
						s.do("rollback")
						other.do("rollback")
						if d.get("exists (select from pg_prepared_xacts)") == "true" {
							d.do("rollback prepared 'p'")
						}
					}
				}
			})
		}
	}
}

// The holder itself is what was committed, and the lock was waited for.
func TestLockThatWasWaitedForIsRefusedIfItsHolderCommittedWork(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := quiet(t)
	for _, level := range levels {
		for _, c := range []struct {
			work, end string
			stale     bool
		}{{write, "commit", true}, {write, "rollback", false}, {"select", "commit", false}, {writeInXX, "commit", true}} {
			for _, wait := range []string{forever, long} {
				for _, early := range []bool{false, true} { // whether the holder wrote before the snapshot was taken, and a later transaction ended before it
					holder := d.begin(readCommitted)
					holder.do("select lock_tx('k')")
					if early {
						holder.do(c.work)
						d.do("select pg_current_xact_id()")
					}
					s := d.begin(level)
					lock := s.start("lock_tx('k', " + wait + ")")
					lock.waitsFor(holder)
					if !early {
						holder.do(c.work)
					}
					holder.do(c.end)
					if c.stale && level != readCommitted {
						lock.want("LK002")
					} else {
						lock.want("true")
					}
					s.done()
				}
			}
		}
	}
}

// A snapshot of a standby does not list what was open on the primary. It goes on
// when the standby is promoted, and lock_tx() works there from then on.
func TestSnapshotFromBeforeAPromotionIsNotVouchedFor(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	primary, d := private(t, map[string]string{"fsync": "off"})
	d.do("create table work (id int)")
	standby := pgtest.Standby(t, primary, pgserver.Config{})
	s := open(t, standby.URL("postgres"))
	replayed := func() {
		t.Helper()
		await(t, s, "pg_last_wal_replay_lsn() >= "+quote(d.get("pg_current_wal_flush_lsn()"))+"::pg_lsn")
	}
	other := d.begin(readCommitted)
	other.do(write)
	d.do("insert into work values (2)") // a later one, which ends first
	replayed()
	late := s.begin("repeatable read")
	late.want("select count(*) from work", "1")
	other.commit()
	replayed()
	if err := primary.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := standby.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	late.want("select count(*) from work", "1")
	late.want("lock_tx('k')", "LK002")
	late.rollback()
	late.begin("repeatable read")
	late.want("select count(*) from work", "2")
	late.want("lock_tx('k')", "true")
}

// The snapshot of a READ COMMITTED transaction is that of its next statement,
// whatever happened since it began.
func TestStatementAfterTheLockSeesWhatTheHolderDid(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := quiet(t)
	for _, wait := range []string{forever, long} {
		d.do("truncate work")
		holder := d.begin(readCommitted)
		holder.do("select lock_tx('k'); " + write)
		s := d.begin(readCommitted)
		s.want("select count(*) from work", "0")
		lock := s.start("lock_tx('k', " + wait + ")")
		lock.waitsFor(holder)
		holder.commit()
		holder.done()
		lock.want("true")
		s.want("select count(*) from work", "1")
		s.done()
	}
}

// A counter that nothing but the lock protects: read the highest number, write
// the next one into a table without a key. With snapshots that are older than
// the lock, numbers come twice; a refusal is what prevents that.
func TestSoakNumbersAreNotCountedTwice(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	t.Run("refused", func(t *testing.T) {
		t.Parallel()
		if twice := count(t, ""); twice != 0 {
			t.Errorf("%d numbers were counted twice", twice)
		}
	})
	t.Run("allowed", func(t *testing.T) { // else nothing is tested here
		t.Parallel()
		if twice := count(t, ", p_allow_stale_snapshot => true"); twice == 0 {
			t.Error("no number was counted twice")
		}
	})
}

// count lets workers count at every isolation level, and returns how many
// numbers came more than once.
func count(t *testing.T, allow string) (twice int64) {
	t.Helper()
	workers, rounds := pgtest.Soak(t, 8, 16), pgtest.Soak[int64](t, 300, 20_000)
	d := quiet(t)
	d.do("create table log (n bigint)")
	var counted, refused atomic.Int64
	var wg sync.WaitGroup
	for range workers {
		s, random := d.connect(), rand.New(rand.NewPCG(rand.Uint64(), 0))
		wg.Go(func() {
			for counted.Load() < rounds && !t.Failed() {
				level := levels[random.IntN(len(levels))]
				s.do("begin isolation level " + level)
				if random.IntN(3) == 0 { // takes the snapshot early
					if code := outcome("", s.run("select count(*) from log")); code == "40001" && level == "serializable" {
						s.do("rollback")
						continue
					} else if code != "" {
						t.Errorf("%s: %s", level, code)
					}
				}
				lock := fmt.Sprintf("lock_tx('counter', %s%s)", []string{forever, "'1 s'", "'5 ms'", "'0'"}[random.IntN(4)], allow)
				switch got := s.outcome(lock); got {
				case "true":
				case "false":
					s.do("commit") // the transaction is in order
					continue
				case "LK002":
					refused.Add(1)
					s.do("rollback")
					continue
				default:
					t.Errorf("%s: %s", lock, got)
					return
				}
				got := s.outcome("select coalesce(max(n), 0) + 1 from log")
				n, err := strconv.ParseInt(got, 10, 64)
				if err == nil {
					got = outcome("", s.run(fmt.Sprintf("insert into log values (%d)", n)))
				}
				end := "commit"
				if random.IntN(8) == 0 {
					end = "rollback"
				}
				if got == "" {
					got = outcome("", s.run(end))
				}
				switch {
				case got == "40001" && level == "serializable":
					_ = s.run("rollback")
				case got != "":
					t.Errorf("%s: %s", level, got)
				case end == "commit":
					counted.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if !t.Failed() {
		d.want("select count(*) from log", fmt.Sprint(counted.Load()))
	}
	t.Logf("counted to %d, refused %d times", counted.Load(), refused.Load())
	if allow == "" && refused.Load() == 0 {
		t.Error("no snapshot was older than its lock: nothing was tested")
	}
	return d.number("select count(*) - count(distinct n) from log")
}

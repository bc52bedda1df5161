package advisory

import (
	"errors"
	"testing"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// callers tries for so many keys beside the test: the second of them is held by another process.
func callers(t *testing.T, p, other *process, n int) (keys []string, outcomes []<-chan tried) {
	t.Helper()
	for i := range n {
		key := string(rune('a' + i))
		if i == 1 {
			mustAcquire(t, other, key, hold.Exclusive)
		}
		keys, outcomes = append(keys, key), append(outcomes, trying(t.Context(), p, key, hold.Exclusive))
		queued(t, p.mux, i+2)
	}
	return keys, outcomes
}

func TestEachRequestOfAMessageGetsItsOwnAnswer(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2, mostCalls, mostCalls + 1, 20} { // function calls, and one statement
		db := pgtest.New(t)
		p, other := connected(t, db.Pool, Config{}), connected(t, db.Pool, Config{})
		resume := stall(p.mux)
		keys, outcomes := callers(t, p, other, n)
		send(t, p.mux)
		if calls := p.mux.message.bytes[0] == 'F'; calls != (n <= mostCalls) && p.mux.conn.functions != nil {
			t.Errorf("%d requests are function calls: %t", n, calls)
		}
		resume()
		for i, outcome := range outcomes {
			switch got := <-outcome; {
			case i == 1 && !errors.Is(got.err, lockerr.ErrNotAcquired):
				t.Errorf("%d requests: %s: %v, want ErrNotAcquired", n, keys[i], got.err)
			case i != 1 && got.err != nil:
				t.Errorf("%d requests: %s: %v", n, keys[i], got.err)
			case i != 1:
				if err := got.lock.release(); err != nil {
					t.Error(err)
				}
				wantFree(t, p, keys[i])
			}
		}
	}
}

// The other calls of the message have been answered, and may have been granted.
func TestFunctionCallThatFailsIsUndoneWithTheOthersOfItsMessage(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, `create function fails(bigint) returns boolean language plpgsql as $$ begin raise exception 'no' using errcode = 'LK999'; end $$`)
	p, other := connected(t, db.Pool, Config{}), connected(t, db.Pool, Config{})
	if p.mux.conn.functions == nil {
		t.Skip("the connection does not end in its backend")
	}
	resume := stall(p.mux)
	keys, outcomes := callers(t, p, other, mostCalls-1)
	if err := db.Pool.QueryRow(t.Context(), "select 'fails(bigint)'::regprocedure::oid").Scan(&p.mux.conn.functions[lockkey.AskTryShared]); err != nil {
		t.Fatal(err)
	}
	failing := trying(t.Context(), p, "fails", hold.Shared)
	queued(t, p.mux, mostCalls+1)
	resume()
	if got := <-failing; lockerr.SQLState(got.err) != "LK999" {
		t.Errorf("the call that fails: %v", got.err)
	}
	for i, outcome := range outcomes {
		got := <-outcome
		if i == 1 && !errors.Is(got.err, lockerr.ErrNotAcquired) || i != 1 && got.err != nil {
			t.Errorf("%s: %v", keys[i], got.err)
		}
		if got.err == nil {
			if err := got.lock.release(); err != nil {
				t.Error(err)
			}
			wantFree(t, p, keys[i]) // one release is enough: what was granted at first is undone
		}
	}
}

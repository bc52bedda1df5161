package sqltest_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// The model counts in thousands of seconds. A lease has half a thousand more, so that
// what a test takes makes no difference; what is said to have passed is taken off the
// rows. Who dies is who does not extend.

// modelledLease is one name: who has it alone, or who share it, and for how long.
type modelledLease struct {
	alone  string
	left   int // how much may pass; -1: nobody has it alone
	shared map[string]int
	token  int64 // the last one that was seen
}

func (l *modelledLease) free() bool { return l.left < 0 && len(l.shared) == 0 }

// has reports whether the holder has it alone.
func (l *modelledLease) has(holder string) bool { return l.left >= 0 && l.alone == holder }

// modelledLeases are names and a semaphore, whose permits are names as well.
type modelledLeases struct {
	conn   *pgx.Conn
	leases map[string]*modelledLease
	most   int // permits
}

const modelledSemaphore = "jobs"

var modelledHolders = []string{"a", "b", "c"}

// answerOf returns what the server says to a call.
func answerOf[T any](r *rapid.T, conn *pgx.Conn, sql string, args ...any) (answer T) {
	if err := conn.QueryRow(context.Background(), "select "+sql, args...).Scan(&answer); err != nil {
		r.Fatalf("%s %v: %v", sql, args, err)
	}
	return answer
}

// same compares an answer with the model's.
func same[T comparable](r *rapid.T, what string, got, want T) {
	if got != want {
		r.Fatalf("%s: %v, want %v", what, got, want)
	}
}

// taken sees that a lease that was not held before has a greater token than ever.
func (m *modelledLeases) taken(r *rapid.T, name string) {
	token := answerOf[int64](r, m.conn, "fencing_token from distributed_locks where lock_name = $1", name)
	if l := m.leases[name]; token <= l.token {
		r.Fatalf("%s has token %d after %d", name, token, l.token)
	} else {
		l.token = token
	}
}

func (m *modelledLeases) actions() map[string]func(*rapid.T) {
	names := slices.Sorted(maps.Keys(m.leases))
	draw := func(r *rapid.T) (name, holder string, l *modelledLease) {
		name = rapid.SampledFrom(names).Draw(r, "name")
		return name, rapid.SampledFrom(modelledHolders).Draw(r, "holder"), m.leases[name]
	}
	ttl := func(r *rapid.T) (n int, seconds int) {
		n = rapid.IntRange(1, 6).Draw(r, "ttl")
		return n, n*1000 + 500
	}
	asserts := func(r *rapid.T, call string, held bool, args ...any) {
		if _, err := m.conn.Exec(context.Background(), "select "+call, args...); (err == nil) != held || err != nil && lockerr.SQLState(err) != lockerr.StateNotHeld {
			r.Fatalf("%s %v: %v; held: %t", call, args, err, held)
		}
	}
	return map[string]func(*rapid.T){
		"": func(r *rapid.T) {
			rows, err := m.conn.Query(context.Background(), `
				select k.name, h.holder, h.shared from unnest($1::text[]) as k (name), lateral pgxlock_holders(k.name) as h`, names)
			if err != nil {
				r.Fatal(err)
			}
			type hold struct {
				Name, Holder string
				Shared       bool
			}
			got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[hold])
			if err != nil {
				r.Fatal(err)
			}
			var want []hold
			for name, l := range m.leases {
				if l.left >= 0 {
					want = append(want, hold{name, l.alone, false})
				}
				for holder := range l.shared {
					want = append(want, hold{name, holder, true})
				}
			}
			compare := func(a, b hold) int { return strings.Compare(a.Name+" "+a.Holder, b.Name+" "+b.Holder) }
			slices.SortFunc(got, compare)
			slices.SortFunc(want, compare)
			if !slices.Equal(got, want) {
				r.Fatalf("held are %v, want %v", got, want)
			}
		},
		"acquire": func(r *rapid.T) {
			name, holder, l := draw(r)
			n, seconds := ttl(r)
			was := l.has(holder)
			want := l.free() || was
			same(r, name, answerOf[bool](r, m.conn, "acquire_lock($1, $2, $3)", name, holder, seconds), want)
			if want {
				l.alone, l.left = holder, n
			}
			if want && !was {
				m.taken(r, name)
			}
		},
		"extend": func(r *rapid.T) {
			name, holder, l := draw(r)
			n, seconds := ttl(r)
			want := l.has(holder)
			same(r, name, answerOf[bool](r, m.conn, "extend_lock($1, $2, $3)", name, holder, seconds), want)
			if want {
				l.left = n
			}
		},
		"release": func(r *rapid.T) {
			name, holder, l := draw(r)
			want := l.has(holder)
			same(r, name, answerOf[bool](r, m.conn, "release_lock($1, $2)", name, holder), want)
			if want {
				l.left = -1
			}
		},
		"assert": func(r *rapid.T) {
			name, holder, l := draw(r)
			asserts(r, "assert_lock_held($1, $2)", l.has(holder), name, holder)
		},
		"share": func(r *rapid.T) {
			name, holder, l := draw(r)
			n, seconds := ttl(r)
			first, want := l.free(), l.left < 0
			same(r, name, answerOf[bool](r, m.conn, "acquire_shared_lock($1, $2, $3)", name, holder, seconds), want)
			if want {
				l.shared[holder] = n
			}
			if first {
				m.taken(r, name)
			}
		},
		"extend a share": func(r *rapid.T) {
			name, holder, l := draw(r)
			n, seconds := ttl(r)
			_, want := l.shared[holder]
			same(r, name, answerOf[bool](r, m.conn, "extend_shared_lock($1, $2, $3)", name, holder, seconds), want)
			if want {
				l.shared[holder] = n
			}
		},
		"release a share": func(r *rapid.T) {
			name, holder, l := draw(r)
			_, want := l.shared[holder]
			same(r, name, answerOf[bool](r, m.conn, "release_shared_lock($1, $2)", name, holder), want)
			delete(l.shared, holder)
		},
		"assert a share": func(r *rapid.T) {
			name, holder, l := draw(r)
			_, held := l.shared[holder]
			asserts(r, "assert_shared_lock_held($1, $2)", held, name, holder)
		},
		"take a permit": func(r *rapid.T) {
			holder, n := rapid.SampledFrom(modelledHolders).Draw(r, "holder"), rapid.IntRange(1, m.most).Draw(r, "permits")
			left, seconds := ttl(r)
			free := 0
			for i := range n {
				if m.leases[fmt.Sprint(modelledSemaphore, "#", i+1)].free() {
					free++
				}
			}
			got := answerOf[*string](r, m.conn, "acquire_permit($1, $2, $3, $4)", modelledSemaphore, holder, n, seconds)
			same(r, "a permit is granted", got != nil, free > 0)
			if got == nil {
				return
			}
			l := m.leases[*got]
			if l == nil || !l.free() || *got > fmt.Sprint(modelledSemaphore, "#", n) {
				r.Fatalf("the permit is %s of %d", *got, n)
			}
			l.alone, l.left = holder, left
			m.taken(r, *got)
		},
		"release all": func(r *rapid.T) {
			holder := rapid.SampledFrom(modelledHolders).Draw(r, "holder")
			want := 0
			for _, l := range m.leases {
				if l.has(holder) {
					l.left = -1
					want++
				}
				if _, shares := l.shared[holder]; shares {
					delete(l.shared, holder)
					want++
				}
			}
			same(r, "released", answerOf[int](r, m.conn, "release_all_locks($1)", holder), want)
		},
		"time passes": func(r *rapid.T) {
			n := rapid.IntRange(1, 4).Draw(r, "time")
			for _, table := range []string{"distributed_locks", "distributed_lock_shares"} {
				if _, err := m.conn.Exec(context.Background(), "update "+table+" set expires_at = expires_at - $1 * interval '1000 seconds'", n); err != nil {
					r.Fatal(err)
				}
			}
			for _, l := range m.leases {
				l.left = max(l.left-n, -1)
				for holder := range l.shared {
					if l.shared[holder] -= n; l.shared[holder] < 0 {
						delete(l.shared, holder)
					}
				}
			}
		},
		"remove what has expired": func(r *rapid.T) {
			answerOf[int](r, m.conn, "reap_expired_locks('0') + pgxlock_reap_shares('0')")
		},
	}
}

// What SQL callers do with leases, shares and permits, and what runs out.
func TestSoakLeasesSharesAndPermitsDoWhatTheirModelDoes(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := installed.New(t)
	conn := db.Connect(t)
	pgtest.Model(t, func(r *rapid.T) map[string]func(*rapid.T) {
		if _, err := conn.Exec(context.Background(), "delete from distributed_locks; delete from distributed_lock_shares"); err != nil {
			r.Fatal(err)
		}
		m := &modelledLeases{conn: conn, leases: make(map[string]*modelledLease), most: 3}
		for _, name := range []string{"k", modelledSemaphore + "#1", modelledSemaphore + "#2", modelledSemaphore + "#3"} {
			m.leases[name] = &modelledLease{left: -1, shared: make(map[string]int)}
		}
		return m.actions()
	})
}

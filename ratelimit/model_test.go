package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// The model counts in hours, which is what one event takes: a test takes so little of
// one that it makes no difference. What is said to have passed is taken off the rows.

// bookings is the model: until which hour everything of a key is taken, counted from the
// beginning of the round. What was granted and not given back it remembers apart from
// that, to see that the hours promise no more than the limit.
type bookings struct {
	now     int
	until   map[string]int
	granted []*booking
}

// booking is n events that may happen at that hour.
type booking struct {
	key          string
	n, burst, at int
	until        int // what was taken of the key, with them
}

// take says how many hours n events have to wait, and books them if that is no more than
// the most.
func (b *bookings) take(key string, n, burst, most int) (wait int, granted *booking) {
	ahead := max(b.until[key]-b.now, 0)
	if wait = max(ahead+n-burst, 0); wait > most {
		return wait, nil
	}
	b.until[key] = b.now + ahead + n
	granted = &booking{key, n, burst, b.now + wait, b.until[key]}
	b.granted = append(b.granted, granted)
	return wait, granted
}

// refund gives back what will not happen, if it was the last of the key. What may have
// happened it does not.
func (b *bookings) refund(x *booking) {
	if x.at <= b.now {
		return
	}
	b.granted = slices.DeleteFunc(b.granted, func(y *booking) bool { return x == y })
	if x.until > b.now && x.until == b.until[x.key] {
		b.until[x.key] = max(x.until-x.n, b.now)
	}
}

// tooMany returns a time in which more may happen than the limit says: than a burst and
// one an hour, of what was granted by that burst and lower ones.
func (b *bookings) tooMany() string {
	slices.SortFunc(b.granted, func(x, y *booking) int { return cmp.Compare(x.at, y.at) })
	for _, last := range b.granted {
		n := 0
		for _, x := range slices.Backward(b.granted) {
			if x.key != last.key || x.burst > last.burst || x.at > last.at {
				continue
			}
			if n += x.n; n > last.burst+last.at-x.at {
				return fmt.Sprintf("%s: %d events from hour %d to %d, and the burst is %d", last.key, n, x.at, last.at, last.burst)
			}
		}
	}
	return ""
}

// modelled is a Limiter's buckets beside the model.
type modelled struct {
	bookings
	limiters []*Limiter
	keys     []string
	reserved []modelledReservation

	pass func(hours int)               // lets time pass for the keys
	reap func() error                  // removes what is idle
	left func(key string) (int, error) // how many hours are taken, rounded up; -1: the key is not there
}

type modelledReservation struct {
	*Reservation
	*booking
}

func retryAfter(err error) time.Duration {
	if e, ok := errors.AsType[*pgxlock.Error](err); ok {
		return e.RetryAfter
	}
	return -1
}

func hoursUp(d time.Duration) int { return int((d + time.Hour - 1) / time.Hour) }

// actions are what can be done to the buckets and the model.
func (m *modelled) actions() map[string]func(*rapid.T) {
	draw := func(r *rapid.T) (*Limiter, string, int) {
		l := rapid.SampledFrom(m.limiters).Draw(r, "limiter")
		return l, rapid.SampledFrom(m.keys).Draw(r, "key"), rapid.IntRange(1, l.rule.burst).Draw(r, "n")
	}
	ctx := context.Background()
	return map[string]func(*rapid.T){
		"": func(r *rapid.T) {
			if wrong := m.tooMany(); wrong != "" {
				r.Fatal(wrong)
			}
			for _, key := range m.keys {
				if got, err := m.left(key); err != nil || max(got, 0) != max(m.until[key]-m.now, 0) {
					r.Fatalf("%s: %d hours are taken, want %d: %v", key, got, max(m.until[key]-m.now, 0), err)
				}
			}
		},
		"allow": func(r *rapid.T) {
			l, key, n := draw(r)
			_, want := m.take(key, n, l.rule.burst, 0)
			if got, err := l.AllowN(ctx, key, n); got != (want != nil) || err != nil {
				r.Fatalf("%t, %v", got, err)
			}
		},
		"reserve": func(r *rapid.T) {
			l, key, n := draw(r)
			most := rapid.IntRange(0, 12).Draw(r, "most")
			wait, want := m.take(key, n, l.rule.burst, most)
			got, err := l.ReserveN(ctx, key, n, pgxlock.MaxWait(time.Duration(most)*time.Hour))
			switch {
			case want != nil && (err != nil || hoursUp(got.Delay()) != wait):
				r.Fatalf("%+v, %v; it has to wait %d hours", got, err, wait)
			case want != nil:
				m.reserved = append(m.reserved, modelledReservation{got, want})
			case err == nil || hoursUp(retryAfter(err)) != wait:
				r.Fatalf("%+v, %v; it would have to wait %d hours", got, err, wait)
			}
		},
		"cancel": func(r *rapid.T) {
			if len(m.reserved) == 0 {
				r.Skip()
			}
			i := rapid.IntRange(0, len(m.reserved)-1).Draw(r, "reservation")
			x := m.reserved[i]
			m.reserved = slices.Delete(m.reserved, i, i+1)
			m.refund(x.booking)
			if err := x.Cancel(ctx); err != nil {
				r.Fatal(err)
			}
		},
		"ask together": func(r *rapid.T) {
			l := rapid.SampledFrom(m.limiters).Draw(r, "limiter")
			var requests []*request
			var want []bool
			for range rapid.IntRange(2, 6).Draw(r, "requests") {
				q := &request{key: rapid.SampledFrom(m.keys).Draw(r, "key"), n: rapid.IntRange(1, l.rule.burst).Draw(r, "n"), noWait: true, Future: batcher.NewFuture()}
				_, granted := m.take(q.key, q.n, l.rule.burst, 0)
				requests, want = append(requests, q), append(want, granted != nil)
			}
			l.backend.ask(requests...)
			for i, q := range requests {
				if err := q.Await(ctx, nil); err != nil || q.got.Granted != want[i] {
					r.Fatalf("number %d of %v: %+v, %v", i+1, want, q.got, err)
				}
			}
		},
		"time passes": func(r *rapid.T) {
			hours := rapid.IntRange(1, 12).Draw(r, "hours")
			m.now += hours
			m.granted = slices.DeleteFunc(m.granted, func(x *booking) bool { return x.at < m.now-24 })
			m.pass(hours)
			for _, x := range m.reserved {
				x.tat -= (time.Duration(hours) * time.Hour).Nanoseconds()
				x.act = x.act.Add(-time.Duration(hours) * time.Hour)
			}
		},
		"remove what is idle": func(r *rapid.T) {
			if err := m.reap(); err != nil {
				r.Fatal(err)
			}
			for _, key := range m.keys {
				if got, err := m.left(key); err != nil || (got < 0) != (m.until[key] <= m.now) {
					r.Fatalf("%s: %d hours, want %d: %v", key, got, m.until[key]-m.now, err)
				}
			}
		},
	}
}

func TestSoakLimitsDoWhatTheirModelDoes(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	var limiters []*Limiter
	for _, burst := range []int{1, 4, 4, 9} { // two processes have the same
		l, err := New(db.Pool, Every(time.Hour), burst, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close(context.Background()) })
		limiters = append(limiters, l)
	}
	round := 0
	pgtest.Model(t, func(*rapid.T) map[string]func(*rapid.T) {
		round++
		m := &modelled{
			bookings: bookings{until: make(map[string]int)},
			limiters: limiters, keys: []string{fmt.Sprint(round, " a"), fmt.Sprint(round, " b")},
			reap: limiters[0].backend.(*table).reap,
		}
		m.pass = func(hours int) {
			db.Exec(t, "update pgxlock_limits set tat = tat - $1 where limit_key = any ($2)", (time.Duration(hours) * time.Hour).Nanoseconds(), m.keys)
		}
		m.left = func(key string) (hours int, err error) {
			var left *time.Duration
			err = db.Pool.QueryRow(t.Context(), "select max(tat) - pgxlock_limit_clock() from pgxlock_limits where limit_key = $1", key).Scan(&left)
			if err != nil || left == nil {
				return -1, err
			}
			return max(hoursUp(*left), 0), nil
		}
		actions := m.actions()
		actions["ask in SQL"] = func(r *rapid.T) {
			key, burst := rapid.SampledFrom(m.keys).Draw(r, "key"), rapid.IntRange(1, 9).Draw(r, "burst")
			n, most := rapid.IntRange(1, burst).Draw(r, "n"), rapid.IntRange(0, 12).Draw(r, "most")
			wait, want := m.take(key, n, burst, most)
			var granted bool
			var delay time.Duration
			if err := db.Pool.QueryRow(t.Context(), "select granted, delay from reserve_rate($1, 1 / 3600.0, $2, $3, $4)", key, burst, n, time.Duration(most)*time.Hour).Scan(&granted, &delay); err != nil {
				r.Fatal(err)
			}
			if granted != (want != nil) || hoursUp(delay) != wait {
				r.Fatalf("%t after %s, want %+v after %d hours", granted, delay, want, wait)
			}
		}
		return actions
	})
}

func TestSoakLimitsInMemoryDoWhatTheirModelDoes(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	pgtest.Model(t, func(r *rapid.T) map[string]func(*rapid.T) {
		l, err := NewMemory(Every(time.Hour), rapid.IntRange(1, 9).Draw(r, "burst"))
		if err != nil {
			r.Fatal(err)
		}
		table := l.backend.(*memory)
		m := &modelled{bookings: bookings{until: make(map[string]int)}, limiters: []*Limiter{l}, keys: []string{"a", "b"}}
		m.pass = func(hours int) {
			for key := range table.tats {
				table.tats[key] -= (time.Duration(hours) * time.Hour).Nanoseconds()
			}
		}
		m.reap = func() error { table.removeIdle(); return nil }
		m.left = func(key string) (hours int, err error) {
			tat, known := table.tats[key]
			if !known {
				return -1, nil
			}
			return max(hoursUp(time.Duration(tat-time.Since(table.began).Nanoseconds())), 0), nil
		}
		return m.actions()
	})
}

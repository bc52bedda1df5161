package once

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// slotsOf asks the server for the beginnings of the slots that contain the instants, or of
// those that many slots ahead.
func slotsOf(t *testing.T, db *pgtest.DB, s slots, at []time.Time, ahead int) []time.Time {
	t.Helper()
	var got []time.Time
	err := db.Pool.QueryRow(t.Context(), `select array_agg(pgxlock_slot(a.t, make_interval(secs => $2), make_interval(secs => $3), $4, $5) order by a.n)
		from unnest($1::timestamptz[]) with ordinality a (t, n)`, at, s.period.Seconds(), s.offset.Seconds(), s.location.String(), ahead).Scan(&got)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func location(t *testing.T, name string) *time.Location {
	t.Helper()
	l, err := time.LoadLocation(name)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestDayBeginsByTheClocksOfItsTimeZone(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	const midnight, halfPastTwo, noon = 0, 2*time.Hour + 30*time.Minute, 12 * time.Hour
	for _, test := range []struct {
		zone         string
		period       time.Duration
		offset       time.Duration
		at           string
		begins, next string
	}{
		{"UTC", day, midnight, "2026-03-29T23:59:59.999999Z", "2026-03-29T00:00:00Z", "2026-03-30T00:00:00Z"},
		{"UTC", day, midnight, "2026-03-30T00:00:00Z", "2026-03-30T00:00:00Z", "2026-03-31T00:00:00Z"},
		// Days of 23 and of 25 hours.
		{"Europe/Berlin", day, midnight, "2026-03-29T12:00:00Z", "2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z"},
		{"Europe/Berlin", day, midnight, "2026-10-25T12:00:00Z", "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z"},
		{"Europe/Berlin", day, midnight, "2026-10-24T21:59:59Z", "2026-10-23T22:00:00Z", "2026-10-24T22:00:00Z"},
		{"America/New_York", day, noon, "2026-03-08T15:59:59Z", "2026-03-07T17:00:00Z", "2026-03-08T16:00:00Z"},
		// 02:30 is skipped on March 29: 03:30 counts, or 01:30 UTC.
		{"Europe/Berlin", day, halfPastTwo, "2026-03-29T01:29:59Z", "2026-03-28T01:30:00Z", "2026-03-29T01:30:00Z"},
		{"Europe/Berlin", day, halfPastTwo, "2026-03-29T01:30:00Z", "2026-03-29T01:30:00Z", "2026-03-30T00:30:00Z"},
		// 02:30 comes twice on October 25, at 00:30 and 01:30 UTC: the second counts.
		{"Europe/Berlin", day, halfPastTwo, "2026-10-25T00:29:59Z", "2026-10-24T00:30:00Z", "2026-10-25T01:30:00Z"},
		{"Europe/Berlin", day, halfPastTwo, "2026-10-25T00:30:00Z", "2026-10-24T00:30:00Z", "2026-10-25T01:30:00Z"},
		{"Europe/Berlin", day, halfPastTwo, "2026-10-25T01:10:00Z", "2026-10-24T00:30:00Z", "2026-10-25T01:30:00Z"},
		{"Europe/Berlin", day, halfPastTwo, "2026-10-25T01:30:00Z", "2026-10-25T01:30:00Z", "2026-10-26T01:30:00Z"},
		// Midnight itself: skipped on September 8, 2024 in Santiago, twice on November 3, 2024 in Havana.
		{"America/Santiago", day, midnight, "2024-09-08T03:59:59Z", "2024-09-07T04:00:00Z", "2024-09-08T04:00:00Z"},
		{"America/Havana", day, midnight, "2024-11-03T04:30:00Z", "2024-11-02T04:00:00Z", "2024-11-03T05:00:00Z"},
		// Weeks begin on Monday.
		{"Europe/Berlin", 7 * day, midnight, "2026-11-22T12:00:00Z", "2026-11-15T23:00:00Z", "2026-11-22T23:00:00Z"},
		{"UTC", 7 * day, 5*day + noon, "2026-11-21T12:00:00Z", "2026-11-21T12:00:00Z", "2026-11-28T12:00:00Z"},
		{"UTC", time.Hour, 5 * time.Minute, "2026-11-21T12:04:59Z", "2026-11-21T11:05:00Z", "2026-11-21T12:05:00Z"},
	} {
		s := slots{test.period, test.offset, location(t, test.zone)}
		at, err := time.Parse(time.RFC3339, test.at)
		if err != nil {
			t.Fatal(err)
		}
		for ahead, want := range []string{test.begins, test.next} {
			for where, got := range map[string]time.Time{"Go": s.at(at, ahead), "SQL": slotsOf(t, db, s, []time.Time{at}, ahead)[0]} {
				if got := got.UTC().Format(time.RFC3339); got != want {
					t.Errorf("%s: %+v at %s, %d ahead: %s, want %s", where, test.zone, test.at, ahead, got, want)
				}
			}
		}
	}
}

// Every instant is in the slot that began last, slots are those of time.Truncate where no
// clocks change, and a memory has the same slots as a server.
func TestSoakSlotsAreTheSameInGoAndInSQL(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	zones := []string{"UTC", "Europe/Berlin", "America/New_York", "America/Havana", "Asia/Kathmandu", "Australia/Lord_Howe", "Pacific/Auckland", "Africa/Casablanca"}
	seed := rand.Uint64()
	t.Log("seed", seed)
	dice := rand.New(rand.NewPCG(seed, 0))
	some := func(d time.Duration) time.Duration { return time.Duration(dice.Int64N(int64(d))) }
	first := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	for range pgtest.Soak(t, 40, 2000) {
		s := slots{location: time.UTC}
		if dice.IntN(3) == 0 {
			s.period = time.Millisecond + some(48*time.Hour).Truncate(time.Microsecond)
		} else {
			s.period = day * time.Duration(1+dice.IntN(10))
			s.location = location(t, zones[dice.IntN(len(zones))])
		}
		s.offset = some(s.period).Truncate([]time.Duration{time.Microsecond, min(s.period, time.Hour/2)}[dice.IntN(2)])
		var at []time.Time
		for range 50 {
			// The beginning and the end of a slot are where mistakes would show.
			near := first.Add(some(25 * 365 * day)).Truncate(time.Microsecond)
			at = append(at, near, s.at(near, 0), s.at(near, 1).Add(-time.Microsecond))
		}
		ahead := dice.IntN(5) - 2
		there := slotsOf(t, db, s, at, ahead)
		for i, instant := range at {
			begins, next := s.at(instant, 0), s.at(instant, 1)
			what := fmt.Sprintf("%s, offset %s, %s: %s", s.period, s.offset, s.location, instant)
			if !there[i].Equal(s.at(instant, ahead)) {
				t.Fatalf("%s, %d ahead: %s in SQL, %s in Go", what, ahead, there[i], s.at(instant, ahead))
			}
			if begins.After(instant) || !next.After(instant) || !s.at(next, -1).Equal(begins) || !s.at(next, 0).Equal(next) {
				t.Fatalf("%s is in the slot of %s, which the one of %s follows", what, begins, next)
			}
			if want := instant.Add(-s.offset).Truncate(s.period).Add(s.offset); s.location == time.UTC && !begins.Equal(want) {
				t.Fatalf("%s is in the slot of %s, Truncate says %s", what, begins, want)
			}
		}
	}
}

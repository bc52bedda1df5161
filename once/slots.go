package once

import "time"

// slots counts periods as pgxlock_slot() in SQL does.
type slots struct {
	period, offset time.Duration
	location       *time.Location
}

// yearOne is the time from the year 1 to 1970, in microseconds.
const yearOne = 62135596800 * 1_000_000

// at returns the beginning of the slot that contains t, or of the slot that many slots ahead.
func (s slots) at(t time.Time, ahead int) time.Time {
	period, offset := s.period.Microseconds(), s.offset.Microseconds()
	if s.period%day != 0 {
		n := (t.UnixMicro()+yearOne-offset)/period + int64(ahead)
		return time.UnixMicro(n*period + offset - yearOne)
	}
	_, east := t.In(s.location).Zone()
	n := (t.UnixMicro()+int64(east)*1_000_000+yearOne-offset)/period + int64(ahead)
	begins := func(n int64) time.Time {
		return instant(time.UnixMicro(n*period+offset-yearOne).UTC(), s.location)
	}
	// When the clocks change, the day may begin an hour later than they show.
	if begins(n - int64(ahead)).After(t) {
		n--
	}
	return begins(n)
}

// instant returns when the clocks of a location show the time that wall has in UTC. If they
// skip that time or show it twice, it returns the later of the two instants that the rules
// before and after the change give, as PostgreSQL does.
func instant(wall time.Time, location *time.Location) time.Time {
	by := func(rulesAt time.Time) (t time.Time, shown bool) {
		_, east := rulesAt.In(location).Zone()
		t = wall.Add(-time.Duration(east) * time.Second)
		_, there := t.In(location).Zone()
		return t, there == east
	}
	before, shownBefore := by(wall.Add(-day))
	after, shownAfter := by(wall.Add(day))
	if shownBefore != shownAfter {
		if shownBefore {
			return before
		}
		return after
	}
	if before.After(after) {
		return before
	}
	return after
}

package once

import (
	"context"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// runTable is the backend of a Runner with a server: the table pgxlock_runs, on a connection
// of its own, which is made at the first use.
type runTable struct {
	cfg     Config
	slots   slots
	place   dbconn.Installation
	session *dbconn.Session
}

func newTable(connections *pgxpool.Config, cfg Config, s slots) *runTable {
	t := &runTable{cfg: cfg, slots: s, place: dbconn.Installation{Asked: cfg.Schema, Config: "once.Config"}}
	t.session = &dbconn.Session{Dialer: dbconn.Dialer{Name: dbconn.ApplicationName(cfg.Owner), Config: connections}, Place: &t.place}
	return t
}

// find connects, which finds the schema.
func (t *runTable) find(wait context.Context) error {
	if t.place.Installed() {
		return nil
	}
	return t.session.Do(wait, dbconn.Timeout, func(context.Context, dbconn.Querier, bool) error { return nil })
}

func (t *runTable) close() { t.session.Close() }

func (t *runTable) due(wait context.Context, key string, missed int, first First) (found []dueSlot, lasts time.Duration, err error) {
	s := t.slots
	err = t.session.Do(wait, dbconn.Timeout, func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
		rows := q.Query(ctx, t.place.Statement(statements.OnceDue), key, s.period.Seconds(), s.offset.Seconds(), s.location.String(), missed, t.cfg.Retry, string(first))
		var left *int64
		found, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (d dueSlot, err error) {
			var other otherSchedule
			err = row.Scan(&d.slot, &d.due, &left, &other.period, &other.offset, &other.zone)
			d.other = other.schedule()
			return d, err
		})
		if left != nil {
			lasts = time.Duration(*left) * time.Microsecond
		}
		return err
	})
	return found, lasts, err
}

func (t *runTable) start(wait context.Context, key string, w which, holder, lease string) (started startedRun, unsure bool, err error) {
	s := t.slots
	var slot *time.Time
	if !w.slot.IsZero() {
		slot = &w.slot
	}
	var period *float64
	if !w.tick {
		period = new(s.period.Seconds())
	}
	var under *string
	if lease != "" {
		under = &lease
	}
	asked := false
	err = t.session.Do(wait, dbconn.Timeout, func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
		asked = true
		rows := q.Query(ctx, t.place.Statement(statements.OnceStart), key, slot, period, s.offset.Seconds(), s.location.String(), t.cfg.Keep.Seconds(), holder, under, string(w.first))
		started, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (r startedRun, err error) {
			var attempt *int
			var other otherSchedule
			err = row.Scan(&r.slot, &attempt, &other.period, &other.offset, &other.zone)
			r.other = other.schedule()
			if attempt != nil {
				r.attempt = *attempt
			}
			return r, err
		})
		return err
	})
	if err != nil {
		unsure = asked && !lockerr.Refused(err)
		if w.tick && lockerr.SQLState(err) == lockerr.StateInvalidParameter { // all else is checked before
			err = &TickError{Tick: w.slot, Err: err}
		}
		return startedRun{}, unsure, err
	}
	return started, false, nil
}

// otherSchedule is a Schedule as start.sql and due.sql return it.
type otherSchedule struct {
	period, offset *float64
	zone           *string
}

func (o otherSchedule) schedule() *Schedule {
	if o.period == nil || o.offset == nil || o.zone == nil {
		return nil
	}
	return &Schedule{ofSeconds(*o.period), ofSeconds(*o.offset), *o.zone}
}

// ofSeconds is the inverse of [time.Duration.Seconds] for whole microseconds.
func ofSeconds(seconds float64) time.Duration {
	return time.Duration(math.Round(seconds*1e6)) * time.Microsecond
}

// maxRunError is how many characters of an error are recorded.
const maxRunError = 2000

func (t *runTable) finish(key string, slot time.Time, holder, state, text string) (last bool, err error) {
	text = strings.ToValidUTF8(strings.ReplaceAll(text, "\x00", ""), "?")
	if runes := []rune(text[:min(len(text), 4*maxRunError)]); len(runes) > maxRunError {
		text = string(runes[:maxRunError])
	}
	var why *string
	if state == runFailed {
		why = &text
	}
	for {
		err = t.session.DoWithin(dbconn.Timeout, func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
			last, err = pgx.CollectExactlyOneRow(q.Query(ctx, t.place.Statement(statements.OnceFinish), key, slot, holder, state, why), pgx.RowTo[bool])
			return err
		})
		ascii := strconv.QuoteToASCII(text)
		if why == nil || !strings.HasPrefix(lockerr.SQLState(err), "22") || *why == ascii {
			return last, err
		}
		why = &ascii // the database's encoding lacks one of its characters
	}
}

package main

import (
	"context"
	"embed"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

//go:embed sql/caller
var callerFiles embed.FS

// callerSQL returns a statement of a SQL caller.
func callerSQL(name string) string {
	text, err := callerFiles.ReadFile("sql/caller/" + name + ".sql")
	if err != nil {
		panic(err) // it is ours
	}
	return string(text)
}

// newSQLPool makes the connections of a process's SQL callers, which work through any pooler.
func newSQLPool(p *process) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(p.URL)
	if err != nil {
		return nil, err
	}
	config.MaxConns = 4
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	return pgxpool.NewWithConfig(context.Background(), config)
}

// A sqlCall is an acquisition by a SQL caller.
type sqlCall struct {
	*request

	pool     *pgxpool.Pool
	form     string // the statement that asks: lease, share or permit
	suffix   string // of the statements for shares
	queue    string
	holder   string
	ttl      time.Duration
	name     string // of the lease
	token    int64
	deadline int64
}

// callSQL waits in turn as docs/sql-leases.md says, holds and releases.
func (h *holds) callSQL(ctx context.Context, c *caller) {
	e := history.Event{Kind: history.Lease, Key: c.key()}
	s := &sqlCall{pool: h.sqlPool, form: "lease", queue: e.Key, ttl: (c.TTL + time.Second - 1).Truncate(time.Second)}
	switch {
	case h.Kind == "permit":
		e.Kind, e.Limit, s.form, s.queue = history.Permit, h.Permits, "permit", e.Key+"#"
	case h.Kind == "shared" && c.rng.IntN(3) > 0:
		e.Shared, s.form, s.suffix = true, "share", "_share"
	}
	s.request = c.ask(e)
	s.holder = fmt.Sprintf("%s.sql.%d", c.Name, s.op)
	call, cancel := c.callContext(ctx)
	defer cancel()
	if s.acquire(call) {
		s.hold(ctx)
		s.release()
	}
}

// acquire asks, sleeps and asks again until the lock is acquired or ctx ends.
func (s *sqlCall) acquire(ctx context.Context) bool {
	args := []any{s.key, s.holder, int(s.ttl.Seconds()), nil}
	if s.form == "permit" {
		args = append(args, s.Permits)
	}
	unanswered, waits := error(nil), false
	for {
		began, pause := history.Now(), 100*time.Millisecond
		var acquired bool
		var ticket *int64
		var again *int64
		err := s.query(ctx, s.form, args, &acquired, &s.name, &s.token, &ticket, &again)
		switch {
		case err != nil:
			if outcome(err, history.Granted, history.Refused, history.Unknown) == history.Unknown {
				unanswered = err
			}
		case acquired:
			s.granted(began)
			return true
		case s.Broken == "refused" && s.rng.IntN(20) == 0:
			s.name, s.token = s.key, 1<<40+s.op
			s.granted(began)
			return true
		default:
			args[3], pause = ticket, time.Duration(*again)*time.Millisecond
			if !waits {
				waits = true
				s.tell(history.Waiting, nil)
			}
		}
		if !sleep(ctx, pause) {
			s.leave(unanswered)
			return false
		}
	}
}

func (s *sqlCall) granted(began int64) {
	s.deadline = began + int64(s.ttl)
	e := history.Event{What: history.Granted, Holder: s.holder, Token: s.token, TTL: s.ttl, Deadline: s.deadline}
	if _, number, ok := strings.Cut(s.name, "#"); ok {
		e.Permit, _ = strconv.Atoi(number) // the name is ours
	}
	s.write(e)
}

// leave ends a wait. A call without an answer may have acquired the lock, or do it later.
func (s *sqlCall) leave(unanswered error) {
	var done bool
	err := s.query(context.Background(), "leave", []any{s.queue, s.holder}, &done)
	if unanswered != nil && err == nil {
		err = s.query(context.Background(), "release_all", []any{s.holder}, &done)
	}
	what := history.Withdrawn
	if unanswered != nil {
		what, err = history.Unknown, unanswered
	}
	s.tell(what, err)
}

// hold renews and writes, as long as the lock is its own.
func (s *sqlCall) hold(ctx context.Context) {
	end := time.Now().Add(s.held())
	for rest := time.Until(end); rest > 0 && sleep(ctx, min(rest, s.ttl/5)); rest = time.Until(end) {
		if s.rng.IntN(3) == 0 {
			s.writeUnder(ctx, s.token, func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, callerSQL("fence"+s.suffix), s.name, s.holder, s.token)
				return err
			})
		}
		began := history.Now()
		var held bool
		err := s.query(ctx, "extend"+s.suffix, []any{s.name, s.holder, int(s.ttl.Seconds())}, &held)
		switch {
		case err == nil && held:
			s.deadline = began + int64(s.ttl)
			s.write(history.Event{What: history.Held, Began: began})
			s.write(history.Event{What: history.Renewed, Deadline: s.deadline})
		case err == nil:
			s.tell(history.Lost, nil)
			return
		case history.Now() > s.deadline:
			return
		}
	}
}

func (s *sqlCall) release() {
	s.tell(history.ReleaseAsk, nil)
	var released bool
	err := s.query(context.Background(), "release"+s.suffix, []any{s.name, s.holder}, &released)
	switch {
	case err != nil:
		s.tell(history.Unknown, err)
	case released:
		s.tell(history.Released, nil)
	default:
		s.tell(history.Lost, nil)
	}
	_ = s.query(context.Background(), "wake", []any{s.queue}, &released) // else a waiter notices it later
}

// query runs a statement in a transaction of its own.
func (s *sqlCall) query(ctx context.Context, name string, args []any, dest ...any) error {
	ctx, cancel := context.WithTimeout(ctx, txTimeout)
	defer cancel()
	return s.pool.QueryRow(ctx, callerSQL(name), args...).Scan(dest...)
}

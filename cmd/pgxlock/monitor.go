package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/mattn/go-runewidth"
	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/monitor"
)

// The commands ls, tree, watch, reap and evict share a Monitor of the database, and show keys,
// holders and waiters alike.

// monitoring says where a Monitor looks, and which names it knows.
type monitoring struct {
	target   target
	names    []string
	internal bool
}

func (m *monitoring) addFlags(cmd *cobra.Command) {
	m.target.addFlags(cmd)
	cmd.Flags().StringArrayVar(&m.names, "name", nil, "`key` to show instead of an advisory lock's number; #42 says that 42 is the number of another program's lock; can be repeated")
}

// addInternalFlag is for what lists holders.
func (m *monitoring) addInternalFlag(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&m.internal, "internal", false, "also show pgxlock's own advisory locks: liveness of sessions, guards, pins of fenced transactions")
}

// open returns the Monitor, and the pool that it uses, for the caller to close.
func (m *monitoring) open(ctx context.Context, u use) (*pgxpool.Pool, *monitor.Monitor, error) {
	pool, err := m.target.connect(ctx, u)
	if err != nil {
		return nil, nil, err
	}
	locks, err := m.of(pool, 0)
	if err != nil {
		pool.Close()
		return nil, nil, err
	}
	return pool, locks, nil
}

// of returns a Monitor that reads so many leases; 0: as many as any.
func (m *monitoring) of(pool *pgxpool.Pool, most int) (*monitor.Monitor, error) {
	locks, err := monitor.New(pool, &monitor.Config{Schema: m.target.schema, Names: views(m.names, typed), Internal: m.internal, MostLeases: most})
	if err != nil {
		return nil, usageError{err}
	}
	return locks, nil
}

// do calls fn with the Monitor.
func (m *monitoring) do(ctx context.Context, u use, fn func(*monitor.Monitor) error) error {
	pool, locks, err := m.open(ctx, u)
	if err != nil {
		return err
	}
	defer pool.Close()
	return fn(locks)
}

// kindNamed is a kind as --kind names it.
func kindNamed(kind pgxlock.Kind) lockKind { return lockKind(kind.String()) }

// kind is what --kind means.
func (k lockKind) kind() pgxlock.Kind {
	return map[lockKind]pgxlock.Kind{kindLease: pgxlock.KindLease, kindAdvisory: pgxlock.KindAdvisory}[k]
}

func modeNamed(mode pgxlock.Mode) string {
	if mode == pgxlock.Shared {
		return "shared"
	}
	return "exclusive"
}

// titled is a key as a table shows it: of pgxlock's own what it is, as its number tells
// nobody anything.
func titled(key, label string, internal bool) string {
	if internal {
		return "(" + printable(label) + ")"
	}
	return printable(key)
}

// typed is the key that a Holder shows like this: #42 and #4,2 are numbers of advisory locks, and
// @billing/invoice:42 is a name in a namespace.
func typed(text string) string {
	key := lockkey.Join(text, true)
	if _, raw := lockkey.ParseRaw(key); raw {
		return key
	}
	return text
}

// holderView is a holder as JSON shows it.
type holderView struct {
	Key         string    `json:"key"`
	Raw         bool      `json:"raw,omitempty"` // key is a number, or a name in a namespace
	Kind        lockKind  `json:"kind"`
	Mode        string    `json:"mode"`
	State       string    `json:"state"`
	Holder      string    `json:"holder"`
	Token       int64     `json:"token,omitempty"`
	PID         int32     `json:"pid,omitempty"`
	Acquired    time.Time `json:"acquired_at,omitzero"`
	Expires     time.Time `json:"expires_at,omitzero"`
	Suspect     bool      `json:"suspect,omitempty"`
	Late        bool      `json:"late,omitempty"`
	Metadata    string    `json:"metadata,omitempty"`
	Application string    `json:"application,omitempty"`
	Role        string    `json:"role,omitempty"`
	Client      string    `json:"client,omitempty"`
	Label       string    `json:"label,omitempty"`
	Internal    bool      `json:"internal,omitempty"`
	EvictedBy   string    `json:"evicted_by,omitempty"`
	Reason      string    `json:"eviction_reason,omitempty"`
}

func viewHolder(h pgxlock.Holder) holderView {
	return holderView{
		h.Key, h.Raw, kindNamed(h.Kind), modeNamed(h.Mode), string(h.State), h.ID, h.Token, h.PID, h.Since, h.Expires, h.Suspect, h.Late,
		h.Metadata, h.Application, h.Role, h.Client, h.Label, h.Internal, h.EvictedBy, h.EvictionReason,
	}
}

// waiterView is a waiter as JSON shows it.
type waiterView struct {
	Key       string    `json:"key"`
	Raw       bool      `json:"raw,omitempty"`
	Kind      lockKind  `json:"kind"`
	Mode      string    `json:"mode,omitempty"` // of one who waits in the server for an advisory lock
	Waiter    string    `json:"waiter"`
	Since     time.Time `json:"since,omitzero"`
	Behind    int       `json:"behind,omitempty"`
	Woken     bool      `json:"woken,omitempty"`
	PID       int32     `json:"pid,omitempty"`
	BlockedBy []int32   `json:"blocked_by,omitempty"`
	Label     string    `json:"label,omitempty"`
	Internal  bool      `json:"internal,omitempty"`
}

func viewWaiter(w monitor.Waiter) waiterView {
	view := waiterView{Key: w.Key, Raw: w.Raw, Kind: kindNamed(w.Kind), Waiter: w.Owner, Since: w.Since, Behind: w.Behind, Woken: w.Woken, PID: w.PID, BlockedBy: w.BlockedBy, Label: w.Label, Internal: w.Internal}
	if w.PID != 0 {
		view.Mode = modeNamed(w.Mode)
	}
	return view
}

// views shows each; none is an empty list.
func views[From, To any](all []From, view func(From) To) []To {
	list := make([]To, len(all))
	for i, one := range all {
		list[i] = view(one)
	}
	return list
}

// maxMetadata is how much of the metadata a narrow table shows.
const maxMetadata = 40

// note is what else is to be said of a holder: why it was evicted, or the rest.
func note(h pgxlock.Holder) string {
	if h.EvictedBy != "" && h.State == pgxlock.StateLive { // an advisory lock, which only its session can release
		return "being " + evictedBy(h.EvictedBy, h.EvictionReason)
	} else if h.EvictedBy != "" {
		return evictedBy(h.EvictedBy, h.EvictionReason)
	}
	var notes []string
	if h.Late {
		notes = append(notes, "renewal late")
	}
	if h.Suspect {
		notes = append(notes, "began later than the server's clock shows")
	}
	if h.Internal {
		h.Label = "" // it stands for the key
	}
	for _, text := range []string{h.Label, h.Client, h.Metadata} {
		if text != "" {
			notes = append(notes, printable(text))
		}
	}
	return strings.Join(notes, ", ")
}

// evictedBy says who evicted a holder, and why.
func evictedBy(who, reason string) string {
	return printable(fmt.Sprintf("evicted by %s: %s", who, reason))
}

// heldUntil is until when a lock was held, at a moment of the server's clock.
func heldUntil(at time.Time, h pgxlock.Holder) time.Time {
	if !h.Expires.IsZero() && h.Expires.Before(at) {
		return h.Expires
	}
	return at
}

// holderTable lists holders. The holder id of an advisory lock has its PID. MODE is never left out, or readers would look
// like writers.
var holderTable = table{
	titles:  []string{"KEY", "KIND", "STATE", "HELD FOR", "REMAINING", "MODE", "HOLDER", "TOKEN", "PID", "NOTE"},
	holders: []string{"HOLDER"},
	keys:    []string{"KEY"},
	prose:   "NOTE",
	extra:   []string{"PID", "NOTE", "TOKEN"},
	last:    []string{"KIND", "HELD FOR", "NOTE", "REMAINING"},
}

// printHolders prints a table of holders as they are at a moment of the server's clock.
func printHolders(w io.Writer, p palette, s sheet, at time.Time, holders []pgxlock.Holder) error {
	rows := make([][]cell, len(holders))
	for i, h := range holders {
		color := map[pgxlock.LeaseState]string{pgxlock.StateLive: green, pgxlock.StateExpired: yellow}[h.State]
		remaining, mode := "", ""
		if !h.Expires.IsZero() {
			remaining = readable.Duration(h.Expires.Sub(at))
		}
		if color == "" {
			color = red
		}
		if h.Mode == pgxlock.Shared {
			mode = modeNamed(h.Mode)
		}
		said := note(h)
		if s.brief() && h.EvictedBy == "" && runewidth.StringWidth(said) > maxMetadata {
			said, s.briefed = runewidth.Truncate(said, maxMetadata, "…"), true
		}
		rows[i] = []cell{
			{text: titled(h.Key, h.Label, h.Internal)},
			{text: string(kindNamed(h.Kind))},
			{string(h.State), color},
			{text: readable.Age(heldUntil(at, h), h.Since)},
			{text: remaining},
			{text: mode},
			{text: printable(h.ID)},
			{text: readable.Number(h.Token)},
			{text: readable.Number(h.PID)},
			{said, faint},
		}
	}
	return holderTable.print(w, p, s, rows)
}

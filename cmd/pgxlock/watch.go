package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/internal/oneline"
	"github.com/pgxlock/pgxlock/monitor"
)

// The command watch shows everything at once, again and again: it redraws a terminal, and
// writes one snapshot after the other elsewhere.

func newWatch() *cobra.Command {
	var m monitoring
	var output format
	var every time.Duration
	var once bool
	var s selection
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Watch who holds locks and who waits",
		Long: `Watch who waits for locks, who holds them, which leases expired, and the server's load.
On a terminal watch redraws the screen. Elsewhere it prints one snapshot after another;
each begins with a line that has the time, and with -o json each is an object on one
line. An empty field is not known.

A lease that evict took away is shown with the reason until somebody acquires it; an
advisory lock, while evict asks its session to release it. --internal also shows the
advisory locks that pgxlock takes for itself.

On a terminal s sorts by kind, key, age, expiry or holder, k shows one kind or all, and /
takes a text that keys must contain: Enter keeps it, Esc clears it. Arrows, PgUp, PgDn,
Home and End scroll. w shows all columns, if need be on several lines, or those for which
there is room. q quits, with exit code 0. The last row says what is shown. --sort, --kind
and --key are where it begins, and select elsewhere too. Leases that expired come last;
what is not known is sorted last.

Standard error says what this role, this schema or this server cannot show, and with
-o json the fields unread and missing; --once exits with another code than 0 if holders or
waiters are among that. Ctrl-C or SIGTERM ends watch. If the server cannot be reached
at the start, watch fails; if the server goes away later, watch says so and waits for it.`,
		Example: `  pgxlock watch --every 5
  pgxlock watch --kind lease --key invoice: --sort age
  pgxlock watch --once
  pgxlock watch --once -o json | jq '.waiters | length'`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < time.Second {
				return usageError{fmt.Errorf("--every is %s, it must be at least 1s: each snapshot stops the server's lock table for a moment", every)}
			}
			if once && cmd.Flags().Changed("every") {
				return usageError{errors.New("--once and --every exclude each other; leave one out")}
			}
			if err := s.check(cmd); err != nil {
				return err
			}
			return m.do(cmd.Context(), reading, func(locks *monitor.Monitor) error {
				b := onTerminal(cmd, s)
				switch {
				case once:
					return lookOnce(cmd, locks, s, display(cmd, output, s))
				case b != nil && output != formatJSON:
					return watchBoard(cmd, locks, every, b)
				}
				return watch(cmd.Context(), cmd, locks, every, display(cmd, output, s))
			})
		},
	}
	m.addFlags(cmd)
	m.addInternalFlag(cmd)
	output.addFlag(cmd)
	addWideFlag(cmd)
	s.addFlags(cmd, orderKind)
	durationVar(cmd.Flags(), &every, "every", "", 2*time.Second, "the `duration` between two snapshots")
	cmd.Flags().BoolVar(&once, "once", false, "print one snapshot and exit")
	return cmd
}

// lookOnce shows one snapshot, on a terminal too as lines that stay.
func lookOnce(cmd *cobra.Command, locks *monitor.Monitor, s selection, show func(monitor.Snapshot) error) error {
	shot, err := locks.Snapshot(cmd.Context())
	if err != nil {
		return err
	}
	shot = s.of(shot)
	return cmp.Or(show(shot), incomplete(cmp.Or(shot.Unread.Leases, shot.Unread.Advisory, shot.Unread.Queues)))
}

// errQuit ends watch because its user says so.
var errQuit = errors.New("")

// watchBoard redraws a terminal until it is ended, or its user quits.
func watchBoard(cmd *cobra.Command, locks *monitor.Monitor, every time.Duration, b *board) error {
	ctx, cancel := context.WithCancelCause(cmd.Context())
	defer cancel(nil)
	keys := openKeyboard(cmd.InOrStdin())
	b.keys, b.quit = keys != nil, func() { cancel(errQuit) }
	defer keys.serve(ctx, b.press, b.again)()
	if err := watch(ctx, cmd, locks, every, b.show); !errors.Is(err, errQuit) {
		return err
	}
	return nil
}

// watch shows snapshots until ctx ends, or an error does not pass by itself.
func watch(ctx context.Context, cmd *cobra.Command, locks *monitor.Monitor, every time.Duration, show func(monitor.Snapshot) error) error {
	var failed error
	begun := false
	for shot, err := range locks.Watch(ctx, every) {
		if err != nil && !begun {
			return err
		}
		if failed = err; failed != nil {
			complain(cmd.ErrOrStderr(), describe(cmd.Flags(), failed))
			continue
		}
		if err := show(shot); err != nil {
			return err
		}
		begun = true
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return outcome{exitCode(failed), errSilent} // it was said
}

// onTerminal returns the terminal that watch redraws; nil if it writes to none.
func onTerminal(cmd *cobra.Command, s selection) *board {
	if file, ok := cmd.OutOrStdout().(*os.File); ok && os.Getenv("TERM") != "dumb" {
		if _, rows, terminal := window(file); terminal {
			return &board{cmd: cmd, out: file, palette: colors(cmd), grant: granting(cmd), selection: s, wide: isWide(cmd), before: strings.Repeat("\n", rows)}
		}
	}
	return nil
}

// display returns how snapshots are shown one after the other.
func display(cmd *cobra.Command, output format, s selection) func(monitor.Snapshot) error {
	out, p, sheet := cmd.OutOrStdout(), colors(cmd), sheetOf(cmd)
	if output == formatJSON {
		return func(shot monitor.Snapshot) error {
			return oneline.JSON(out, viewSnapshot(s.of(shot)), "")
		}
	}
	var missing []string
	return func(shot monitor.Snapshot) error {
		if !slices.Equal(missing, shot.Missing) {
			missing = shot.Missing
			printMissing(cmd, missing)
		}
		text, err := frame(p, s.of(shot), false, sheet)
		if err == nil {
			_, err = io.WriteString(out, text+"\n")
		}
		return err
	}
}

// Escape sequences of ECMA-48, and of the VT100 for lines that are too long.
const (
	home      = "\x1b[H"
	restOfRow = "\x1b[K"
	restOfAll = "\x1b[J"
	cutLines  = "\x1b[?7l"
	wrapLines = "\x1b[?7h"
)

// redrawn writes a text over what is on a screen of so many rows (0: it is not known), from its
// line top on, or from the last one that fills the screen, which it returns. The status is the
// last row, if there is any.
func redrawn(text string, rows, top int, status string) (screen string, at int) {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if status != "" && rows > 0 {
		rows--
	}
	if room := rows - 2; room > 0 && len(lines) > room+1 {
		at = min(top, len(lines)-room)
		hint := fmt.Sprintf("... %d more lines", len(lines)-room-at)
		if at > 0 {
			hint += fmt.Sprintf(", %d above", at)
		}
		lines = append(slices.Clone(lines[at:at+room]), hint)
	}
	if status != "" {
		lines = append(lines, status)
	}
	return home + cutLines + strings.Join(lines, restOfRow+"\n") + restOfRow + "\n" + wrapLines + restOfAll, at
}

// frame is a snapshot as people read it. Waiters come first: a screen may have no room for all.
func frame(p palette, shot monitor.Snapshot, missing bool, s sheet) (string, error) {
	var b strings.Builder
	at := timestamp(shot.At)
	count := func(n int, unread error) string {
		switch {
		case unread != nil && n == 0:
			return "?"
		case unread != nil:
			return fmt.Sprintf("at least %d", n)
		}
		return fmt.Sprint(n)
	}
	u := shot.Unread
	counts := fmt.Sprintf("%s  %s held, %s waiting, %s expired", at, count(len(shot.Holders), cmp.Or(u.Leases, u.Advisory)),
		count(len(shot.Waiters), cmp.Or(u.Queues, u.Advisory)), count(len(shot.Expired), u.Leases))
	pressure := fmt.Sprintf("lock table %d of %d, notifications %.0f%%", shot.Load.Locks, shot.Load.Room, 100*shot.Load.Notifications)
	if shot.Load.OldestPID != 0 {
		pressure += fmt.Sprintf(", oldest snapshot %s of process %d", readable.Age(shot.At, shot.Load.OldestSince), shot.Load.OldestPID)
	}
	b.WriteString(strings.Replace(wrap(counts, s.columns), at, p.paint(bold, at), 1) + "\n" + wrap(pressure, s.columns) + "\n")
	if len(shot.Waiters) > 0 {
		b.WriteString("\n")
		if err := printWaiters(&b, p, s, shot); err != nil {
			return "", err
		}
	}
	if holders := slices.Concat(shot.Holders, shot.Expired); len(holders) > 0 {
		b.WriteString("\n")
		if err := printHolders(&b, p, s, shot.At, holders); err != nil {
			return "", err
		}
	}
	if missing {
		for _, text := range shot.Missing {
			b.WriteString("\n" + p.paint(faint, wrap("not shown: "+printable(text), s.columns)))
		}
	}
	return b.String(), nil
}

var waiterTable = table{
	titles:  []string{"KEY", "KIND", "WAITER", "BEHIND", "PID", "WAITED", "HELD BY"},
	holders: []string{"WAITER", "HELD BY"},
	keys:    []string{"KEY"},
	extra:   []string{"PID", "KIND", "BEHIND"},
	last:    []string{"HELD BY"},
}

func printWaiters(w io.Writer, p palette, s sheet, shot monitor.Snapshot) error {
	holders := make(map[monitor.LockID][]*pgxlock.Holder)
	for _, q := range shot.Waits().Queues {
		holders[q.LockID] = q.Holders
	}
	rows := make([][]cell, len(shot.Waiters))
	for i, waiter := range shot.Waiters {
		rows[i] = []cell{
			{text: titled(waiter.Key, waiter.Label, waiter.Internal)},
			{text: string(kindNamed(waiter.Kind))},
			{printable(waiter.Owner), yellow},
			{text: readable.Number(waiter.Behind)},
			{text: readable.Number(waiter.PID)},
			{text: readable.Age(shot.At, waiter.Since)},
			{text: some(holders[waiter.Lock()], 1, func(h *pgxlock.Holder) string { return printable(h.ID) })},
		}
	}
	return waiterTable.print(w, p, s, rows)
}

// snapshotView is a snapshot as JSON shows it.
type snapshotView struct {
	At      time.Time    `json:"at"`
	Holders []holderView `json:"holders"`
	Expired []holderView `json:"expired"`
	Waiters []waiterView `json:"waiters"`
	Server  serverView   `json:"server"`
	Missing []string     `json:"missing"`
	Unread  []string     `json:"unread"`
}

type serverView struct {
	Locks         int64     `json:"locks"`
	Room          int64     `json:"room"`
	Notifications float64   `json:"notifications"`
	OldestPID     int32     `json:"oldest_pid,omitempty"`
	OldestSince   time.Time `json:"oldest_since,omitzero"`
}

func viewSnapshot(shot monitor.Snapshot) snapshotView {
	unread := []string{}
	for _, part := range []struct {
		name string
		err  error
	}{{"leases", shot.Unread.Leases}, {"advisory", shot.Unread.Advisory}, {"queues", shot.Unread.Queues}} {
		if part.err != nil {
			unread = append(unread, part.name)
		}
	}
	return snapshotView{
		shot.At, views(shot.Holders, viewHolder), views(shot.Expired, viewHolder), views(shot.Waiters, viewWaiter), serverView(shot.Load),
		append([]string{}, shot.Missing...), unread,
	}
}

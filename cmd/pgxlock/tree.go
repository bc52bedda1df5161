package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/monitor"
)

// The command tree shows which holder blocks which waiter.

func newTree() *cobra.Command {
	var m monitoring
	var output format
	cmd := &cobra.Command{
		Use:   "tree",
		Short: "Show who waits for whom",
		Long: `Show each lock that somebody waits for, its holders and its waiters. Below a waiter stand
the locks that it holds and that block others. Standard error says what this role, this
schema or this server cannot show. If holders or waiters are among that, tree exits with
another code than 0, and prints no tree that would be empty.`,
		Example: `  pgxlock tree
  pgxlock tree -o json | jq -r '.[].holders[].holder'`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return m.do(cmd.Context(), reading, func(locks *monitor.Monitor) error {
				shot, err := locks.Snapshot(cmd.Context())
				if err != nil {
					return err
				}
				queues := shot.Waits().Tree()
				unread := cmp.Or(shot.Unread.Queues, shot.Unread.Leases, shot.Unread.Advisory)
				if len(queues) == 0 && unread != nil {
					return unread
				}
				var addressed []pgxlock.Holder
				if output == formatJSON && len(queues) > 0 {
					addressed = shot.Holders
				}
				printMissing(cmd, missingFrom(shot.Missing, addressed))
				switch {
				case output == formatJSON:
					err = printJSON(cmd.OutOrStdout(), views(queues, viewQueue))
				case len(queues) == 0:
					_, err = fmt.Fprintln(cmd.OutOrStdout(), "nobody waits")
				default:
					err = printTree(cmd.OutOrStdout(), colors(cmd), columns(cmd.OutOrStdout()), shot.At, queues)
				}
				return cmp.Or(err, incomplete(unread))
			})
		},
	}
	m.addFlags(cmd)
	m.addInternalFlag(cmd)
	output.addFlag(cmd)
	return cmd
}

// incomplete makes the error of a command that has printed what could be read, and on standard
// error what could not: it says nothing, and has the exit code of the reason.
func incomplete(unread error) error {
	if unread == nil {
		return nil
	}
	return outcome{exitCode(unread), errSilent}
}

// missingFrom is what a Snapshot lacks of a list of holders with their addresses: not the transactions of other roles'
// sessions, which watch and serve show, and their addresses only if one of these may have such a session.
func missingFrom(all []string, listed []pgxlock.Holder) []string {
	unaddressed := slices.ContainsFunc(listed, func(h pgxlock.Holder) bool { return h.PID != 0 && h.Client == "" })
	return chosen(all, func(text string) bool {
		return !strings.HasPrefix(text, "transactions of other ") && (unaddressed || !strings.HasPrefix(text, "addresses and transactions of other "))
	})
}

func printMissing(cmd *cobra.Command, missing []string) {
	for _, text := range missing {
		complain(cmd.ErrOrStderr(), "not shown: "+withGrant(cmd, printable(inFlags(cmd.Flags(), advices, text))))
	}
}

// queueView is a lock that somebody waits for as JSON shows it.
type queueView struct {
	Key     string        `json:"key"`
	Kind    lockKind      `json:"kind"`
	Holders []holderView  `json:"holders"`
	Waiters []blockedView `json:"waiters"`
	Unread  bool          `json:"holders_unread,omitempty"`
}

type blockedView struct {
	waiterView
	Blocks []queueView `json:"blocks"`
}

func viewQueue(q monitor.Queue) queueView {
	return queueView{q.Key, kindNamed(q.Kind), views(q.Holders, func(h *pgxlock.Holder) holderView { return viewHolder(*h) }), views(q.Waiters, func(b monitor.Blocked) blockedView {
		return blockedView{viewWaiter(*b.Waiter), views(b.Blocks, viewQueue)}
	}), q.Unread}
}

func printTree(w io.Writer, p palette, columns int, at time.Time, queues []monitor.Queue) error {
	var b strings.Builder
	writeQueues(&b, p, columns, at, "", queues)
	_, err := io.WriteString(w, b.String())
	return err
}

// hanging is how far the other lines of one that is broken are indented.
const hanging = 6

func writeQueues(b *strings.Builder, p palette, columns int, at time.Time, indent string, queues []monitor.Queue) {
	for _, q := range queues {
		holders := "held by nobody (the next waiter is about to acquire it)"
		switch {
		case len(q.Holders) > 0:
			holders = heldFor(at, q.Holders)
		case q.Unread:
			holders = "held by holders that cannot be shown"
		}
		line := fmt.Sprintf("%s (%s) %s", p.paint(bold, queueTitle(q)), kindNamed(q.Kind), holders)
		if len(q.Waiters) == 0 {
			line += p.paint(faint, ": see elsewhere")
		}
		b.WriteString(hang(indent, line, len(indent)+hanging, columns))
		for _, waiter := range q.Waiters {
			line := fmt.Sprintf("%s waits%s", p.paint(yellow, printable(waiter.Owner)), after(" for ", readable.Age(at, waiter.Since)))
			if waiter.Behind > 0 {
				line += fmt.Sprintf(", and %d more in its process", waiter.Behind)
			}
			if waiter.Woken {
				line += ", woken"
			}
			b.WriteString(hang(indent+"  ", line, len(indent)+2+hanging, columns))
			writeQueues(b, p, columns, at, indent+"    ", waiter.Blocks)
		}
	}
}

// heldFor names the oldest holders of a lock, and says for how long they have it.
func heldFor(at time.Time, holders []*pgxlock.Holder) string {
	oldest := slices.SortedStableFunc(slices.Values(holders), func(a, b *pgxlock.Holder) int { return readable.Earlier(a.Since, b.Since) })
	text := "shared by "
	if slices.ContainsFunc(oldest, func(h *pgxlock.Holder) bool { return h.Mode != pgxlock.Shared }) {
		text = "held by "
	}
	if len(oldest) > 1 {
		text += fmt.Sprintf("%d: ", len(oldest))
	}
	return text + some(oldest, 3, func(h *pgxlock.Holder) string { return printable(h.ID) + after(" for ", readable.Age(at, h.Since)) })
}

// queueTitle is the key of a lock that somebody waits for, as a table shows it.
func queueTitle(q monitor.Queue) string {
	for _, h := range q.Holders {
		if h.Internal {
			return titled(q.Key, h.Label, true)
		}
	}
	return titled(q.Key, "", false)
}

// after is a text behind another, if there is one.
func after(before, text string) string {
	if text == "" {
		return ""
	}
	return before + text
}

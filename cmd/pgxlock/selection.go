package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/monitor"
)

// A selection says which locks ls and watch show, and in which order. The zero value is all, in
// the order of a Snapshot.
type selection struct {
	kinds []string // none: all
	key   string   // what keys contain
	order string
}

// The orders. That of kinds is the order of a Snapshot.
const (
	orderKind   = "kind"
	orderKey    = "key"
	orderAge    = "age"
	orderExpiry = "expiry"
	orderHolder = "holder"
)

var (
	orders = []string{orderKind, orderKey, orderAge, orderExpiry, orderHolder}
	kinds  = []string{string(kindLease), string(kindAdvisory)}
)

func (s *selection) addFlags(cmd *cobra.Command, order string) {
	flags := cmd.Flags()
	flags.StringSliceVar(&s.kinds, "kind", nil, "only these `kinds`: lease, advisory (locks of sessions and of transactions)")
	flags.StringVar(&s.key, "key", "", "only keys that contain this `text`")
	flags.StringVar(&s.order, "sort", order, "`order`: key, kind (and key), age (the oldest first), expiry (the next first) or holder")
	complete(cmd, "kind", kinds)
	complete(cmd, "sort", orders)
}

// complete completes the values of a flag, which must be there.
func complete(cmd *cobra.Command, flag string, values []string) {
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic("pgxlock: " + err.Error())
	}
}

// check says what is wrong with the flags.
func (s *selection) check(cmd *cobra.Command) error {
	if err := refuseEmpty(cmd.Flags(), "all", "kind", "key"); err != nil {
		return err
	}
	for _, kind := range s.kinds {
		if kind == "transaction" {
			return usageError{fmt.Errorf("--kind %q: the server does not tell the lock of a transaction from that of a session; use advisory for both", kind)}
		}
		if !slices.Contains(kinds, kind) {
			return usageError{fmt.Errorf("--kind %q: use %s", kind, strings.Join(kinds, " or "))}
		}
	}
	if !slices.Contains(orders, s.order) {
		return usageError{fmt.Errorf("--sort %q: use %s", s.order, strings.Join(orders, ", "))}
	}
	return nil
}

// has reports whether a lock is selected.
func (s selection) has(kind pgxlock.Kind, key string) bool {
	return (len(s.kinds) == 0 || slices.Contains(s.kinds, string(kindNamed(kind)))) && strings.Contains(key, s.key)
}

// of returns what is selected of a snapshot, in order, and why something of that is left out.
func (s selection) of(shot monitor.Snapshot) monitor.Snapshot {
	shot.Holders, shot.Expired = s.holders(shot.Holders), s.holders(shot.Expired)
	shot.Waiters = chosen(shot.Waiters, func(w monitor.Waiter) bool { return s.has(w.Kind, w.Key) })
	if len(s.kinds) > 0 && !slices.Contains(s.kinds, string(kindAdvisory)) {
		shot.Unread.Advisory = nil
	}
	if len(s.kinds) > 0 && !slices.Contains(s.kinds, string(kindLease)) {
		if shot.Unread.Leases = nil; errors.Is(shot.Unread.Queues, pgxlock.ErrSchema) { // advisory locks need none
			shot.Unread.Queues = nil
		}
	}
	sortBy(s, shot.Waiters, func(w monitor.Waiter) sortable { return sortable{w.Kind, w.Key, w.Since, time.Time{}, w.Owner} })
	return shot
}

func (s selection) holders(all []pgxlock.Holder) []pgxlock.Holder {
	holders := chosen(all, func(h pgxlock.Holder) bool { return s.has(h.Kind, h.Key) })
	sortBy(s, holders, func(h pgxlock.Holder) sortable { return sortable{h.Kind, h.Key, h.Since, h.Expires, h.ID} })
	return holders
}

// chosen returns those that are wanted, and leaves the list as it is.
func chosen[T any](all []T, wanted func(T) bool) (list []T) {
	for _, one := range all {
		if wanted(one) {
			list = append(list, one)
		}
	}
	return list
}

// A sortable is what holders and waiters are sorted by.
type sortable struct {
	kind           pgxlock.Kind
	key            string
	since, expires time.Time
	who            string
}

// sortBy sorts, and leaves those in their order that are equal: waiters are in that of their
// queue.
func sortBy[T any](s selection, list []T, of func(T) sortable) {
	if s.order == "" || s.order == orderKind {
		return
	}
	slices.SortStableFunc(list, func(one, other T) int {
		a, b := of(one), of(other)
		first := 0
		switch s.order {
		case orderAge:
			first = readable.Earlier(a.since, b.since)
		case orderExpiry:
			first = readable.Earlier(a.expires, b.expires)
		case orderHolder:
			first = strings.Compare(a.who, b.who)
		}
		return cmp.Or(first, strings.Compare(a.key, b.key), -cmp.Compare(a.kind, b.kind))
	})
}

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/monitor"
)

// The command ls lists the holders of locks, and the leases that nobody released.

func newLs() *cobra.Command {
	var m monitoring
	var output format
	var f filter
	var exitCode bool
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the locks that are held",
		Long: `List the locks that are held: leases, permits, shares, and advisory locks of sessions and
of transactions. A shared lock has one line per holder. An empty field is not known.
Filters are combined with AND.

STATE is live, expired (others may take the lease over), or abandoned (expired more than
an hour ago). HELD FOR of an expired lease ends at its expiry. A lease that evict
took away is listed with the reason until somebody acquires it.

The server says of an advisory lock neither since when it is held, nor whether a session
or a transaction has it, and knows it by its number: --name shows its key, and Lockers
publish the keys of those that they hold for long. It is always live: --older-than,
--expires-within and --expired list leases alone. --sort puts what is not known last.

An empty list is a success; with --exit-code, ls exits with 1 then. Standard error says
what this role, this schema or this server cannot show. If locks that are asked for are
among that, ls exits with another code than 0, and prints no list that would be empty.`,
		Example: `  pgxlock ls --state expired,abandoned              # what nobody released
  pgxlock ls --older-than 1h --sort age --limit 10  # the ten oldest leases
  pgxlock ls --kind advisory --name nightly         # advisory, one by its name
  pgxlock ls --holder pod-7 -o json | jq -r '.[].key'
  while pgxlock ls --holder pod-7 --state live --exit-code; do sleep 1; done`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(cmd); err != nil {
				return err
			}
			return m.do(cmd.Context(), reading, func(locks *monitor.Monitor) error {
				shot, err := locks.Snapshot(cmd.Context())
				if err != nil {
					return err
				}
				shot = f.of(shot)
				unread := cmp.Or(shot.Unread.Leases, shot.Unread.Advisory)
				if len(shot.Holders) == 0 && unread != nil {
					return unread
				}
				listed := shot.Holders
				if f.limit > 0 && len(listed) > f.limit {
					listed = listed[:f.limit]
				}
				printMissing(cmd, missingFrom(shot.Missing, listed))
				if len(listed) < len(shot.Holders) {
					cmd.PrintErrf("pgxlock: only the first %d of %d locks are shown; --limit shows more\n", f.limit, len(shot.Holders))
				}
				if output == formatJSON {
					err = printJSON(cmd.OutOrStdout(), views(listed, func(h pgxlock.Holder) listedView { return viewListed(shot.At, h) }))
				} else {
					err = printHolders(cmd.OutOrStdout(), colors(cmd), sheetOf(cmd), shot.At, listed)
				}
				if err == nil && exitCode && len(listed) == 0 {
					err = errNone
				}
				return cmp.Or(err, incomplete(unread))
			})
		},
	}
	m.addFlags(cmd)
	m.addInternalFlag(cmd)
	output.addFlag(cmd)
	addWideFlag(cmd)
	f.addFlags(cmd)
	cmd.Flags().BoolVar(&exitCode, "exit-code", false, "exit with 1 if no lock is listed")
	return cmd
}

// listedView is a holder as JSON shows it in a list.
type listedView struct {
	holderView
	HeldSeconds      *float64 `json:"held_seconds"`
	RemainingSeconds *float64 `json:"remaining_seconds"`
}

func viewListed(at time.Time, h pgxlock.Holder) listedView {
	view := listedView{holderView: viewHolder(h)}
	if !h.Since.IsZero() {
		view.HeldSeconds = new(heldUntil(at, h).Sub(h.Since).Seconds())
	}
	if !h.Expires.IsZero() {
		view.RemainingSeconds = new(h.Expires.Sub(at).Seconds())
	}
	return view
}

// filter says which locks ls lists, and in which order.
type filter struct {
	selection
	prefix        string
	holder        string
	states        []string
	expired       bool // both states that are not live
	olderThan     time.Duration
	expiresWithin time.Duration
	limit         int // 0: none
}

var states = []string{string(pgxlock.StateLive), string(pgxlock.StateExpired), string(pgxlock.StateAbandoned)}

func (f *filter) addFlags(cmd *cobra.Command) {
	f.selection.addFlags(cmd, orderKey)
	flags := cmd.Flags()
	flags.StringVar(&f.prefix, "prefix", "", "only keys that begin with this `text`")
	flags.StringVar(&f.holder, "holder", "", "only holder ids that contain this `text`, such as an owner or a host")
	flags.StringSliceVar(&f.states, "state", nil, "only these `states`: live, expired, abandoned")
	flags.BoolVar(&f.expired, "expired", false, "only leases that are no longer live: the same as --state expired,abandoned")
	durationVar(flags, &f.olderThan, "older-than", "", 0, "only leases acquired more than this `duration` ago")
	durationVar(flags, &f.expiresWithin, "expires-within", "", 0, "only live leases that expire within this `duration` unless they are renewed")
	flags.IntVar(&f.limit, "limit", 0, "at most this `number` of locks (default: all)")
	complete(cmd, "state", states)
}

// check says what is wrong with the flags.
func (f *filter) check(cmd *cobra.Command) error {
	flags := cmd.Flags()
	if err := f.selection.check(cmd); err != nil {
		return err
	}
	if err := refuseEmpty(flags, "all", "prefix", "holder", "state"); err != nil {
		return err
	}
	if f.expired && flags.Changed("state") {
		return usageError{fmt.Errorf("--expired and --state exclude each other; leave one out")}
	}
	for _, state := range f.states {
		if !slices.Contains(states, state) {
			return usageError{fmt.Errorf("--state %q: use %s", state, strings.Join(states, ", "))}
		}
	}
	if f.expired {
		f.states = states[1:]
	}
	for name, value := range map[string]int64{"older-than": int64(f.olderThan), "expires-within": int64(f.expiresWithin), "limit": int64(f.limit)} {
		if flags.Changed(name) && value <= 0 {
			return usageError{fmt.Errorf("--%s is %s, it must be more than 0", name, flags.Lookup(name).Value)}
		}
	}
	if flags.Changed("kind") && f.leasesOnly() && !slices.Contains(f.kinds, string(kindLease)) {
		return usageError{fmt.Errorf("--kind %s: --older-than, --expires-within and other states than live are of leases alone; leave them out", strings.Join(f.kinds, ","))}
	}
	return nil
}

// leasesOnly reports whether only a lease can pass.
func (f *filter) leasesOnly() bool {
	return f.olderThan > 0 || f.expiresWithin > 0 || len(f.states) > 0 && !slices.Contains(f.states, string(pgxlock.StateLive)) ||
		len(f.kinds) > 0 && !slices.Contains(f.kinds, string(kindAdvisory))
}

// of returns a snapshot whose Holders are all that pass, with what may be missing among them.
func (f *filter) of(shot monitor.Snapshot) monitor.Snapshot {
	shot.Holders = chosen(slices.Concat(shot.Holders, shot.Expired), func(h pgxlock.Holder) bool { return f.passes(shot.At, h) })
	shot = f.selection.of(shot)
	if f.leasesOnly() {
		if shot.Unread.Advisory = nil; shot.Unread.Leases == nil {
			shot.Missing = nil // it is about other locks
		}
	}
	return shot
}

// passes reports whether a holder passes all filters but those of the selection.
func (f *filter) passes(at time.Time, h pgxlock.Holder) bool {
	return strings.HasPrefix(h.Key, f.prefix) && strings.Contains(h.ID, f.holder) &&
		(len(f.states) == 0 || slices.Contains(f.states, string(h.State))) &&
		(f.olderThan == 0 || !h.Since.IsZero() && at.Sub(h.Since) > f.olderThan) &&
		(f.expiresWithin == 0 || h.State == pgxlock.StateLive && !h.Expires.IsZero() && h.Expires.Sub(at) <= f.expiresWithin)
}

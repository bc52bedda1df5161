package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/mattn/go-runewidth"
	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/monitor"
)

// The command evict takes a lock away from one holder, after it has asked the user.

// errNotEvicted means that there was nobody to take the lock away from, or that it was
// decided otherwise.
var errNotEvicted = errors.New("nothing was evicted")

// mostListed is how many holders or locks are listed.
const mostListed = 20

// eviction is what evict is asked to do.
type eviction struct {
	monitoring     monitoring
	key            string // as people write it
	kind           lockKind
	holder, reason string
	pid            int32
	token          int64
	yes, terminate bool
}

func newEvict() *cobra.Command {
	var e eviction
	cmd := &cobra.Command{
		Use:   "evict KEY --reason TEXT",
		Short: "Take a lock away from its holder",
		Long: `Take a lock away from one holder. The eviction is recorded, and the holder learns who
evicted it and why. On a terminal evict asks first, and says what happens to which holder;
elsewhere it needs --yes.

The holder of a lease, a permit or a share notices at its next renewal; what it fences
is refused at once. An advisory lock can be released by its session alone: evict asks
the session, and a Locker's session releases the lock. If it has not done so after 5 s,
evict exits with 75.

Then --terminate ends the whole session: every lock that it holds goes with it, the
session waits for none any more, and its program has lost its connection. evict lists
them first, and afterwards each lock that was released. To end another role's takes
pg_monitor and pg_signal_backend. A holder in a Locker that does not answer within a
second then learns only that its session has ended; pgxlock evictions says why.

An advisory lock without a known name is #42 or #4,2, as watch shows it. If a lock of that
name is held as well, evict asks for the one that is meant. Permit 3 of the semaphore jobs
is jobs#3; jobs is enough if only one permit is held and no other lock is called jobs.

evict exits with 0 if it took the lock away; with 1 if nobody holds it any more, as a
lease that expired, or if the answer was no.`,
		Example: `  pgxlock evict invoice:42 --reason 'hangs since the deploy'
  pgxlock evict '#42' --reason 'INC-7'
  pgxlock evict '#42' --reason 'INC-7' --pid 4711 --terminate --yes`,
		Args: oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			e.key = args[0]
			if err := e.check(cmd); err != nil {
				return usageError{err}
			}
			if typed(e.key) == e.key { // a number would become one of another program's, also where it is pgxlock's own
				e.monitoring.names = append(e.monitoring.names, e.key)
			}
			return e.monitoring.do(cmd.Context(), writing, func(locks *monitor.Monitor) error {
				err := e.do(cmd, locks)
				if failed, ok := errors.AsType[*pgxlock.Error](err); ok {
					failed.Op, failed.Key = "evict", e.key // which of its calls failed is no news to the user
				}
				return err
			})
		},
	}
	flags := cmd.Flags()
	e.monitoring.addFlags(cmd)
	flags.StringVar(&e.reason, "reason", "", "`why`, for the holder and for the record")
	e.kind.addFlag(cmd, "lease or advisory: evict only that (default: whichever is held)")
	flags.StringVar(&e.holder, "holder", "", "only the holder with this `id`, which may be shortened as by ls: web-1:…KPN")
	flags.Int64Var(&e.token, "token", 0, "only the acquisition with this `token`")
	flags.Int32Var(&e.pid, "pid", 0, "only the session of this server `process`")
	flags.BoolVar(&e.yes, "yes", false, "do not ask")
	flags.BoolVar(&e.terminate, "terminate", false, "end the session that holds the lock, and release all that it holds")
	return cmd
}

// check says what is wrong with the flags.
func (e *eviction) check(cmd *cobra.Command) error {
	const longest = 900 // bytes, as Monitor.Evict has it
	if err := refuseEmpty(cmd.Flags(), "any", "holder"); err != nil {
		return err
	}
	switch {
	case e.reason == "":
		return errors.New("--reason is missing; say why, for the holder and for the record")
	case len(e.reason) > longest:
		return fmt.Errorf("--reason has %d bytes, it must have at most %d", len(e.reason), longest)
	case e.terminate && e.kind == kindLease:
		return errors.New("--terminate ends a session, and a lease has none; leave out --kind lease or --terminate")
	}
	if !e.yes {
		if in, ok := cmd.InOrStdin().(*os.File); ok {
			if _, _, terminal := window(in); terminal {
				return nil
			}
		}
		return errors.New("--yes is missing; without a terminal evict cannot ask")
	}
	return nil
}

func (e *eviction) do(cmd *cobra.Command, locks *monitor.Monitor) error {
	h, err := e.find(cmd, locks)
	if err != nil {
		return err
	}
	if h.Internal {
		return fmt.Errorf("%s belongs to pgxlock itself (%s); evict the holder of the lock that it is for, pgxlock watch shows it; %w", shown(h.Key), h.Label, errNotEvicted)
	}
	var gone bool
	freed := []pgxlock.Holder{h}
	if e.terminate {
		freed, gone, err = e.end(cmd, locks, h)
	} else if err = e.ask(cmd, effect(h), fmt.Sprintf("Take the %s%s?", described(h), whose(h.Application, h.Role, h.Client))); err == nil {
		gone, err = locks.Evict(cmd.Context(), h, e.reason)
	}
	switch {
	case errors.Is(err, monitor.ErrStillHeld) && cmd.Context().Err() == nil:
		return outcome{exitBusy, fmt.Errorf("process %d was asked to release %s and still holds it: it is no Locker's, cannot listen, or hangs; --terminate ends its session and releases all that it holds", h.PID, shown(h.Key))}
	case err != nil:
		return err
	case !gone:
		return fmt.Errorf("%s no longer holds %s; %w", printable(h.ID), shown(h.Key), errNotEvicted)
	}
	for _, h := range freed {
		if _, err := fmt.Fprintf(cmd.OutOrStdout(), "evicted: %s\n", described(h)); err != nil {
			return err
		}
	}
	return nil
}

// effect says what an eviction means for a holder.
func effect(h pgxlock.Holder) string {
	if h.Kind == pgxlock.KindAdvisory {
		return "Its session is asked to release the lock. A Locker's does so at once, and its holder learns who evicted it, and why; other programs keep the lock."
	}
	return "Others may acquire the lock at once. Its holder learns who evicted it, and why, at its next renewal, within a third of its TTL; until then it may go on, but what it fences is refused."
}

// find returns the one holder that is meant. If it is not known which, it lists all of them.
func (e *eviction) find(cmd *cobra.Command, locks *monitor.Monitor) (pgxlock.Holder, error) {
	ctx, flags := cmd.Context(), cmd.Flags()
	kinds := []pgxlock.Kind{pgxlock.KindAdvisory, pgxlock.KindLease}
	switch {
	case e.terminate:
		kinds = kinds[:1]
	case e.kind != "":
		kinds = []pgxlock.Kind{e.kind.kind()}
	}
	var found, chosen []pgxlock.Holder
	for _, kind := range kinds { // each by itself: what cannot be seen is an error, also where the other one is held
		keys := []string{e.key}
		if number := typed(e.key); number != e.key && kind == pgxlock.KindAdvisory { // it may be a name, too
			keys = append(keys, number)
		}
		for _, key := range keys {
			holders, err := locks.Holders(ctx, monitor.Filter{Kind: kind, Key: key})
			if err != nil {
				return pgxlock.Holder{}, err
			}
			found = append(found, holders...)
		}
	}
	if len(found) == 0 && slices.Contains(kinds, pgxlock.KindLease) {
		var err error
		if found, err = permitsOf(ctx, locks, e.key); err != nil {
			return pgxlock.Holder{}, err
		}
	}
	found = slices.CompactFunc(found, func(a, b pgxlock.Holder) bool { // a session may have it in both modes
		return a.PID != 0 && a.PID == b.PID && a.Raw == b.Raw
	})
	whole := slices.ContainsFunc(found, func(h pgxlock.Holder) bool { return h.ID == e.holder })
	for _, h := range found {
		if (!flags.Changed("holder") || h.ID == e.holder || !whole && shortens(e.holder, h.ID)) && (!flags.Changed("pid") || h.PID == e.pid) && (!flags.Changed("token") || h.Token == e.token) {
			chosen = append(chosen, h)
		}
	}
	switch {
	case len(chosen) == 1:
		return chosen[0], nil
	case len(chosen) > 1:
		by := e.list(cmd, chosen)
		return pgxlock.Holder{}, usageError{fmt.Errorf("%s has several holders%s", shown(e.key), after("; choose one with ", strings.Join(by, " or ")))}
	case len(found) == 1:
		return pgxlock.Holder{}, fmt.Errorf("that holder does not hold %s; %w; held: %s", shown(e.key), errNotEvicted, described(found[0]))
	case len(found) > 0:
		e.list(cmd, found)
		begun := slices.IndexFunc(found, func(h pgxlock.Holder) bool { return strings.HasPrefix(h.ID, e.holder) })
		whole := ""
		if flags.Changed("holder") {
			whole = "; give the whole id, or as ls shortens it, such as " + abbreviated(printable(found[max(0, begun)].ID), fewest)
		}
		return pgxlock.Holder{}, fmt.Errorf("that holder does not hold %s; %w%s", shown(e.key), errNotEvicted, whole)
	}
	as, remedy := "", "pgxlock watch shows who holds what"
	switch {
	case e.terminate:
		as, remedy = " as an advisory lock", "leave out --terminate to evict the holder of a lease"
	case e.kind == kindAdvisory:
		as = " as an advisory lock"
	case e.kind == kindLease:
		as = " as a lease"
	}
	return pgxlock.Holder{}, fmt.Errorf("nobody holds %s%s; %w; %s", shown(e.key), as, errNotEvicted, remedy)
}

// shortens reports whether a text is a holder id with … or ... for parts of it, as a narrow table shows it. A plain
// beginning is not enough: the holder pod-1 may be gone, and pod-10 there.
func shortens(text, id string) bool {
	text = regexp.QuoteMeta(strings.ReplaceAll(text, "...", "…"))
	pattern := strings.ReplaceAll(text, "…", ".*")
	return pattern != text && regexp.MustCompile("^"+pattern+"$").MatchString(printable(id))
}

// choices are what chooses one of several holders.
var choices = []struct {
	by string
	of func(pgxlock.Holder) any
}{
	{"its key", func(h pgxlock.Holder) any { return h.Key }},
	{"--kind", func(h pgxlock.Holder) any { return h.Kind }},
	{"--holder", func(h pgxlock.Holder) any { return h.ID }},
	{"--pid", func(h pgxlock.Holder) any { return h.PID }},
	{"--token", func(h pgxlock.Holder) any { return h.Token }},
}

// list prints holders, each with what chooses it, and returns by what that is.
func (e *eviction) list(cmd *cobra.Command, holders []pgxlock.Holder) (by []string) {
	lines := make([]string, len(holders))
	for _, c := range choices {
		if !slices.ContainsFunc(holders, func(h pgxlock.Holder) bool { return c.of(h) != c.of(holders[0]) }) {
			continue
		}
		by = append(by, c.by)
		for i, h := range holders {
			if value := fmt.Sprint(c.of(h)); value != "0" { // a lease has no process
				lines[i] += strings.TrimPrefix(c.by, "its key") + " " + shellQuote(printable(value)) + " "
			}
		}
	}
	cmd.PrintErrf("pgxlock: the holders of %s:\n", shown(e.key))
	for i, h := range holders[:min(mostListed, len(holders))] {
		if len(by) == 0 { // one session has the key's number by a name, and as a number
			lines[i] = described(h)
		} else {
			lines[i] += after(" since ", timestamp(h.Since)) + after(", ", runewidth.Truncate(printable(h.Metadata), maxMetadata, "…"))
		}
		cmd.PrintErrln("  " + strings.TrimSpace(lines[i]))
	}
	if more := len(holders) - mostListed; more > 0 {
		cmd.PrintErrf("  and %d more, see pgxlock ls\n", more)
	}
	return by
}

// permitsOf returns who holds permits of a semaphore.
func permitsOf(ctx context.Context, locks *monitor.Monitor, name string) ([]pgxlock.Holder, error) {
	holders, err := locks.Holders(ctx, monitor.Filter{Kind: pgxlock.KindLease, Prefix: name + "#"})
	return slices.DeleteFunc(holders, func(h pgxlock.Holder) bool {
		_, err := strconv.ParseUint(h.Key[len(name)+1:], 10, 32)
		return err != nil
	}), err
}

// end ends the session of a holder, after all that ends with it was shown, and returns what it held.
func (e *eviction) end(cmd *cobra.Command, locks *monitor.Monitor, h pgxlock.Holder) (freed []pgxlock.Holder, gone bool, err error) {
	if h.PID == 0 {
		return nil, false, errors.New("a prepared transaction holds the lock and has no session; end it with COMMIT PREPARED or ROLLBACK PREPARED")
	}
	session, err := locks.Session(cmd.Context(), h.PID)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	if !slices.ContainsFunc(session.Holders, func(has pgxlock.Holder) bool { return has.LockKey() == h.LockKey() }) {
		return nil, false, nil
	}
	which := fmt.Sprintf("the session of process %d%s", session.PID, whose(session.Application, session.Role, session.Client))
	cmd.PrintErrf("pgxlock: %s will end, with:\n", which)
	var ends []string
	for _, has := range session.Holders {
		ends = append(ends, fmt.Sprintf("holds %s, %s", shown(has.Key), modeNamed(has.Mode)))
	}
	for _, wants := range session.Waiters {
		ends = append(ends, fmt.Sprintf("waits for %s, %s", shown(wants.Key), modeNamed(wants.Mode)))
	}
	for _, end := range ends[:min(mostListed, len(ends))] {
		cmd.PrintErrln("  " + end)
	}
	if more := len(ends) - mostListed; more > 0 {
		cmd.PrintErrf("  and %d more\n", more)
	}
	const effect = "The whole session ends, and its program loses all of these. In a Locker that still answers, their holders learn who evicted them, and why; others learn that the connection is broken."
	others := ""
	if more := len(session.Holders) - 1; more > 0 {
		others = fmt.Sprintf(" and %d more", more)
	}
	if err := e.ask(cmd, effect, "End "+which+", which holds "+shown(h.Key)+others+"?"); err != nil {
		return nil, false, err
	}
	gone, err = locks.Terminate(cmd.Context(), session, e.reason)
	return session.Holders, gone, err
}

// whose is what is known of whose session it is.
func whose(application, role, client string) string {
	var known []string
	for _, part := range []struct{ what, text string }{{"application", application}, {"role", role}, {"client", client}} {
		if part.text != "" {
			known = append(known, fmt.Sprintf("%s %q", part.what, part.text))
		}
	}
	if len(known) == 0 {
		return ""
	}
	return " (" + strings.Join(known, ", ") + ")"
}

// ask returns nil if the answer is yes. effect says what a yes means.
func (e *eviction) ask(cmd *cobra.Command, effect, question string) error {
	if e.yes {
		return nil
	}
	width := columns(cmd.ErrOrStderr())
	cmd.PrintErr(wrap(effect, width) + "\n" + wrap(question+" [y/N]", width) + " ")
	answer := make(chan string, 1)
	go func() { // a signal ends the wait, not the reading
		line, err := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			line = ""
		}
		answer <- line
	}()
	select {
	case <-cmd.Context().Done():
		return context.Cause(cmd.Context())
	case line := <-answer:
		if slices.Contains([]string{"y", "yes"}, strings.ToLower(strings.TrimSpace(line))) {
			return nil
		}
		return errNotEvicted
	}
}

// described names a holder, and what it has.
func described(h pgxlock.Holder) string {
	kind := string(kindNamed(h.Kind))
	if h.Kind == pgxlock.KindAdvisory {
		kind += " lock"
	}
	text := fmt.Sprintf("%s %s from %s", kind, shown(h.Key), printable(h.ID))
	if h.Mode == pgxlock.Shared {
		text = "shared " + text
	}
	if h.Token != 0 {
		text += fmt.Sprintf(", token %d", h.Token)
	}
	if h.Kind == pgxlock.KindAdvisory {
		text += fmt.Sprintf(", process %d", h.PID)
	}
	return text + after(", since ", timestamp(h.Since))
}

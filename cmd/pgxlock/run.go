package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
)

// The command run reads its flags and waits for the lock here. The files run_*.go start, watch
// and end the command that it runs, also for lead and once.

// idleTime is after how long connections are closed that only the wait for the lock needed.
const idleTime = 5 * time.Second

// task is what run, lead or once is asked to do.
type task struct {
	target            target
	kind              lockKind
	waiting           waiting
	conflict          conflict
	ttl, grace        time.Duration
	shared            bool
	permits           int
	metadata          string
	key               string
	program           string // the command's file
	command           []string
	renewals          *renewalReport
	logger            *slog.Logger
	stderr            io.Writer
	stderrIsATerminal bool
}

func newRun() *cobra.Command {
	var e task
	cmd := &cobra.Command{
		Use:   "run KEY [flags] -- COMMAND [ARG...]",
		Short: "Run a command while holding a lock",
		Long: `Acquire a lock, run a command, and release the lock: flock(1) for many machines. The
lock is a lease, or with --kind advisory an advisory lock.

run renews the lease while the command runs. If it cannot renew in time, the command
and its process group get SIGTERM, and SIGKILL before anyone else can acquire the
lock. If the lock is evicted, or its session ends, they get SIGTERM at once, but the
next holder may already run: only fencing keeps the two apart.

run passes signals on to the command. When the command ends, run kills what is left in
its process group. The command finds PGXLOCK_KEY, PGXLOCK_HOLDER and PGXLOCK_TOKEN in
its environment.

The exit code is the command's own, 128+n if signal n ended it, 126 if it cannot be
executed, 127 if it does not exist, 75 if somebody else holds the lock (-E changes
that), 80 if the lock was lost. pgxlock help exit-codes lists the others.`,
		Example: `  pgxlock run -n nightly -- ./backup.sh /var/lib/app     # if the lock is free
  pgxlock run -w 10m import --permits 3 -- ./import.sh   # three at a time
  pgxlock run -s report -- ./read.sh                     # with others with -s
  pgxlock run -n -E 0 -q cleanup -- ./cleanup.sh         # busy is no failure`,
		Args:              keyAndCommand,
		ValidArgsFunction: completeCommand,
		RunE: func(cmd *cobra.Command, args []string) error {
			e.read(cmd, args)
			return e.do(cmd.Context(), cmd.Flags())
		},
	}
	flags := cmd.Flags()
	e.addFlags(cmd)
	e.kind.addFlag(cmd, "lease or advisory; an advisory lock needs no tables, and the server releases it when its session ends")
	e.waiting.addFlags(cmd, "how long to wait for somebody else's lock, and for a server that is starting; 0 tries once (default: until the lock is free)", "the same as --wait 0")
	e.conflict.addFlags(cmd, exitBusy, "somebody else holds the lock")
	flags.BoolVarP(&e.shared, "shared", "s", false, "share the lock with others that use --shared")
	flags.IntVar(&e.permits, "permits", 0, "allow `N` holders at a time instead of one (leases only)")
	flags.StringVar(&e.metadata, "metadata", "", "`text` for operators to see (leases only)")
	return cmd
}

// keyAndCommand wants a key, and a command after --.
func keyAndCommand(cmd *cobra.Command, args []string) error {
	usage := cmd.CommandPath() + " KEY -- COMMAND"
	switch dash := cmd.ArgsLenAtDash(); {
	case dash < 0 && len(args) > 1:
		return errors.New("-- is missing before the command: " + usage)
	case dash < 0 || len(args) == dash:
		return errors.New("the command is missing: " + usage)
	case dash == 0:
		return errors.New("the key is missing: " + usage)
	case dash != 1:
		return fmt.Errorf("one key is expected before --, and not %d", dash)
	}
	return nil
}

// completeCommand completes the arguments that keyAndCommand wants.
func completeCommand(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return nil, cobra.ShellCompDirectiveDefault // files, for the command
}

// addFlags adds the flags that run, lead and once share.
func (e *task) addFlags(cmd *cobra.Command) {
	flags := cmd.Flags()
	e.target.addFlags(cmd)
	e.kind = kindLease
	durationVar(flags, &e.ttl, "ttl", "", 30*time.Second, "how long the lock stays held without a renewal")
	durationVar(flags, &e.grace, "grace", "", 0, "how long before the lock expires locally the command gets SIGTERM (default: a sixth of --ttl)")
}

// read reads the arguments.
func (e *task) read(cmd *cobra.Command, args []string) {
	e.key, e.command = args[0], args[1:]
	e.renewals, e.stderr = newRenewalReport(), cmd.ErrOrStderr()
	if file, ok := e.stderr.(*os.File); ok {
		_, _, e.stderrIsATerminal = window(file)
	}
}

// lockKind is the value of --kind.
type lockKind string

const (
	kindLease    lockKind = "lease"
	kindAdvisory lockKind = "advisory"
)

func (k *lockKind) addFlag(cmd *cobra.Command, usage string) {
	choiceVar(cmd, k, "kind", "", "kind", usage, kindLease, kindAdvisory)
}

// maxAdvisoryTTL is the most that AdvisoryConfig.TTL may be.
const maxAdvisoryTTL = 24 * 24 * time.Hour

// check says what is wrong with the flags, and fills in their defaults.
func (e *task) check(flags *pflag.FlagSet) error {
	if err := cmp.Or(e.waiting.check(flags), e.conflict.check(), e.checkTimes(flags)); err != nil {
		return err
	}
	switch {
	case flags.Changed("permits") && e.permits < 1:
		return fmt.Errorf("--permits is %d, it must be 1 or more", e.permits)
	case e.permits > 0 && e.shared:
		return errors.New("--permits and --shared exclude each other: permits are exclusive; leave one out")
	case e.kind == kindAdvisory && (e.permits > 0 || e.metadata != ""):
		return errors.New("--permits and --metadata are for leases only; leave out --kind advisory")
	}
	e.waiting.noWait = e.waiting.noWait || flags.Changed("wait") && e.waiting.most == 0
	return e.checkLock()
}

// checkTimes says what is wrong with --ttl and --grace, and fills in the default.
func (e *task) checkTimes(flags *pflag.FlagSet) error {
	if e.grace == 0 && !flags.Changed("grace") {
		e.grace = e.ttl / 6
	}
	least, most := (e.ttl/12 + time.Millisecond - 1).Truncate(time.Millisecond), (e.ttl / 3).Truncate(time.Millisecond)
	switch {
	case e.ttl < time.Second:
		return fmt.Errorf("--ttl is %s, it must be 1s or more", readable.Exact(e.ttl))
	case e.kind == kindAdvisory && e.ttl > maxAdvisoryTTL:
		return fmt.Errorf("--ttl is %s, with --kind advisory it must be %s or less", readable.Exact(e.ttl), readable.Exact(maxAdvisoryTTL))
	case e.grace < least || e.grace > most:
		return fmt.Errorf("--grace is %s, with --ttl %s it must be between %s and %s", readable.Exact(e.grace), readable.Exact(e.ttl), readable.Exact(least), readable.Exact(most))
	}
	return nil
}

// checkLock says what is wrong with the name and the options of the lock: they are wrong in
// memory, too.
func (e *task) checkLock() error {
	memory := pgxlock.NewMemoryLocker()
	_, err := e.locking(memory)(context.Background(), e.key, append(e.options(), pgxlock.NoWait)...)
	return err
}

// options are those of the acquisition, but for its mode.
func (e *task) options() []pgxlock.PermitOption {
	if e.metadata == "" {
		return nil
	}
	return []pgxlock.PermitOption{pgxlock.Metadata(e.metadata)}
}

// acquiring acquires a lock or a permit.
type acquiring func(ctx context.Context, key string, opts ...pgxlock.PermitOption) (*pgxlock.Lock, error)

// locking acquires locks in the mode that was asked for.
func (e *task) locking(l *pgxlock.Locker) acquiring {
	return func(ctx context.Context, key string, opts ...pgxlock.PermitOption) (*pgxlock.Lock, error) {
		all := []pgxlock.AcquireOption{pgxlock.Exclusive}
		if e.shared {
			all[0] = pgxlock.Shared
		}
		for _, opt := range opts {
			all = append(all, opt)
		}
		return l.Acquire(ctx, key, all...)
	}
}

// do takes the lock, runs the command and gives the lock back.
func (e *task) do(ctx context.Context, flags *pflag.FlagSet) error {
	if err := e.check(flags); err != nil {
		return usageError{err}
	}
	return e.withPool(ctx, func(pool *pgxpool.Pool, signals chan os.Signal) error {
		return e.withLocker(pool, func(from *opened) error {
			return e.conduct(ctx, signals, func(ctx context.Context, under func(tenure) error) error {
				lock, err := e.acquire(ctx, from)
				if err != nil {
					return e.conflict.outcome(err)
				}
				return e.release(lock, under(tenure{lock: lock, env: lockEnvironment(lock)}))
			})
		})
	})
}

// withPool finds the command, and calls fn with what is needed to connect and with the signals
// that are passed on.
func (e *task) withPool(ctx context.Context, fn func(*pgxpool.Pool, chan os.Signal) error) (err error) {
	if e.program, err = exec.LookPath(e.command[0]); errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return outcome{exitNotFound, err}
	} else if err != nil {
		return outcome{exitNotRunnable, err}
	}
	signals, err := passedOn() // from now on none is missed
	if err != nil {
		return err
	}
	config, err := e.target.config(writing)
	if err != nil {
		return err
	}
	config.MaxConnIdleTime = idleTime
	pool, err := pgxpool.NewWithConfig(ctx, config) // a Locker takes its configuration only
	if err != nil {
		return err
	}
	defer pool.Close()
	return fn(pool, signals)
}

// opened is a Locker, or a Semaphore of it.
type opened struct {
	locker  *pgxlock.Locker
	acquire acquiring
	holders func(ctx context.Context, key string) ([]pgxlock.Holder, error)
}

// withLocker calls fn with a Locker.
func (e *task) withLocker(pool *pgxpool.Pool, fn func(*opened) error) error {
	from, err := e.open(pool)
	if err != nil {
		return usageError{err}
	}
	defer closeInTime(from.locker)
	return fn(from)
}

// closeInTime closes what has ended its work: what is held is given back by now, and what
// cannot be reached has a TTL.
func closeInTime(c interface{ Close(context.Context) error }) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = c.Close(ctx)
}

func (e *task) open(pool *pgxpool.Pool) (*opened, error) {
	if e.kind == kindAdvisory {
		l, err := pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{TTL: e.ttl, Schema: e.target.schema, Logger: e.logger})
		if err != nil {
			return nil, err
		}
		return &opened{l, e.locking(l), l.Holders}, nil
	}
	l, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: e.ttl, Schema: e.target.schema, OneConnection: true, Logger: e.logger, Observe: e.renewals.observe})
	if err != nil {
		return nil, err
	}
	if e.permits == 0 {
		return &opened{l, e.locking(l), l.Holders}, nil
	}
	s, err := l.Semaphore(e.permits)
	if err != nil {
		return nil, err
	}
	return &opened{l, s.Acquire, s.Holders}, nil
}

// tenure is what a command runs under.
type tenure struct {
	lock   *pgxlock.Lock   // nil: none, the command has all the time that it wants
	work   context.Context // ends when the command must end; nil: with the lock
	env    []string        // the variables of its own that the command gets
	health *healthFile     // is there until the command has ended, or is told to end; nil: none
}

// lockEnvironment is what a command learns of its lock.
func lockEnvironment(lock *pgxlock.Lock) []string {
	return []string{"PGXLOCK_KEY=" + lock.Key(), "PGXLOCK_HOLDER=" + lock.Holder(), fmt.Sprint("PGXLOCK_TOKEN=", lock.Token())}
}

// commandEnd is how a command ended, of which its user learns by the exit code alone.
type commandEnd struct {
	code   int            // that a shell would make of it
	by     syscall.Signal // ended it; 0: none did
	passed syscall.Signal // had been passed on to it; 0: none
}

func (commandEnd) Error() string { return "" }

// how says it in a record, or in a log.
func (c commandEnd) how() string {
	text := fmt.Sprintf("the command exited with %d", c.code)
	if c.by != 0 {
		text = "the command was ended by signal: " + c.by.String()
	}
	if c.passed != 0 {
		text += fmt.Sprintf(", after pgxlock passed on signal: %s", c.passed)
	}
	return text
}

// endedCommand is the error of a command that was told to end, which was said: its lock was
// lost, or its leader was asked to step down.
type endedCommand struct {
	signal syscall.Signal // asked us to end as well; 0: none did
}

func (endedCommand) Error() string { return "" }

// acquire waits for the lock, and says so.
func (e *task) acquire(ctx context.Context, from *opened) (*pgxlock.Lock, error) {
	began, stop := time.Now(), e.announcing(ctx, from)
	lock, err := e.wait(ctx, from)
	if stop() && err == nil {
		e.say("acquired %s after %s", shown(lock.Key()), readable.Duration(time.Since(began)))
	}
	return lock, err
}

// wait waits for the lock. With --wait it also waits for a server that cannot be reached, which
// may just be starting: the attempts to connect pace themselves.
func (e *task) wait(ctx context.Context, from *opened) (*pgxlock.Lock, error) {
	opts := e.options()
	if e.waiting.noWait {
		opts = append(opts, pgxlock.NoWait)
	}
	if e.waiting.most <= 0 {
		return from.acquire(ctx, e.key, opts...)
	}
	until := time.Now().Add(e.waiting.most)
	for left := e.waiting.most; ; {
		lock, err := from.acquire(ctx, e.key, append(opts, pgxlock.MaxWait(left))...)
		left = time.Until(until)
		if !errors.Is(err, pgxlock.ErrUnavailable) || left <= 0 {
			return lock, err
		}
	}
}

// release releases the lock of a command that has ended with err, and returns with which error
// run ends.
func (e *task) release(lock *pgxlock.Lock, err error) error {
	released := lock.Release(context.Background())
	_, told := errors.AsType[endedCommand](err)
	until, _ := lock.Deadline()
	switch {
	case told:
	case errors.Is(released, pgxlock.ErrLost):
		return outcome{exitLost, released}
	case released != nil && time.Now().Before(until): // else it has ended with its TTL
		e.say("%s; the lock ends with its TTL", describe(e.target.flags, released))
	}
	return err
}

// announcing announces until stop is called, which reports whether anything was said.
func (e *task) announcing(ctx context.Context, from *opened) (stop func() bool) {
	if e.conflict.quiet {
		return func() bool { return false }
	}
	ctx, cancel := context.WithCancel(ctx)
	ended, said := make(chan struct{}), false
	go func() {
		defer close(ended)
		said = e.announce(ctx, from)
	}()
	return func() bool {
		cancel()
		<-ended
		return said
	}
}

// announce says for whom we wait: after a second, and on a terminal whenever that changes. It
// reports whether it said anything.
func (e *task) announce(ctx context.Context, from *opened) bool {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for said := ""; ; {
		select {
		case <-ctx.Done():
			return said != ""
		case <-tick.C:
		}
		holders, err := from.holders(ctx, e.key)
		if err != nil || len(holders) == 0 || ctx.Err() != nil {
			continue // the next second may know more
		}
		if e.shared && !slices.ContainsFunc(holders, func(h pgxlock.Holder) bool { return h.Mode != pgxlock.Shared }) {
			continue // it waits for its turn, and not for them
		}
		if text := heldBy(holders); text != said {
			e.say("waiting for %s, held by %s", shown(e.key), text)
			said = text
		}
		if !e.stderrIsATerminal { // a log has enough of one line
			return true
		}
	}
}

// heldBy names holders, and says since when they hold, as far as that is known.
func heldBy(holders []pgxlock.Holder) string {
	return some(holders, 3, func(h pgxlock.Holder) string {
		return printable(h.ID) + after(" since ", timestamp(h.Since))
	})
}

// some names so many at most, and says how many more there are.
func some[E any](all []E, most int, name func(E) string) string {
	var names []string
	for _, one := range all[:min(most, len(all))] {
		names = append(names, name(one))
	}
	text := strings.Join(names, ", ")
	if more := len(all) - most; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// say writes a message.
func (e *task) say(format string, args ...any) {
	_, _ = fmt.Fprintf(e.stderr, "pgxlock: "+format+"\n", args...) // where that fails nobody listens
}

// shown is a key in a message.
func shown(key string) string { return `"` + printable(key) + `"` }

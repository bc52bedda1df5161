package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"time"
	_ "time/tzdata" // for --zone where the system has no time zones, such as in an empty image

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/once"
)

// The command once runs a command once in each period, as run does under a lock.

// onceTask is what once is asked to do.
type onceTask struct {
	task
	every, offset time.Duration
	zone          string
	first         once.First
	retry         bool
	output        format
	stdout        io.Writer
	complaints    *complaints
	slot          time.Time // when the current period began, by our clock
}

func newOnce() *cobra.Command {
	o := onceTask{first: once.FirstNow}
	cmd := &cobra.Command{
		Use:   "once KEY --every DURATION [flags] -- COMMAND [ARG...]",
		Short: "Run a command once in each period",
		Long: `Run a command unless it was already started in this period, on any machine: for cron on
all of them. The server's clock decides which period it is, and a row remembers the run.
A period begins at multiples of --every since the year 1, plus --offset: days at
midnight by the clocks of --zone, weeks on Monday.

Without --retry the command is started at most once in a period, however it ends. With
--retry it is started again, by the next pgxlock once in the same period, if it failed
or its machine died; it runs under a lease then, as with pgxlock run, and is ended if
that is lost.

The first call for a key runs the command, also late in a period: whatever calls once has
chosen the moment. With --first next a key of which no run is recorded begins with the
next period. A changed --offset or --zone does not run a period twice: the next run comes
half a period to one and a half after the last.

If the run of this period was already started, once says how it stands. It exits with 0 if
the run has succeeded or has not ended: -E chooses another code, -q prints nothing, -o json
prints the run. It exits with 1 if the run has failed and is not started again: see pgxlock
runs. A run without --retry whose process has died counts as one that has not ended.
Otherwise the command's environment, signals, process
group and exit code are those of pgxlock run. The command also gets PGXLOCK_SLOT, the
beginning of the period, and PGXLOCK_ATTEMPT. PGXLOCK_HOLDER and PGXLOCK_TOKEN are there
with --retry only; PGXLOCK_KEY is the name of the lease then.`,
		Example: `  pgxlock once report --every 1d -- ./report.sh
  pgxlock once report --every 1d --zone Europe/Berlin --retry -- ./report.sh
  pgxlock once -q cleanup --every 15m -- ./cleanup.sh
  pgxlock once weekly --every 1w --offset 1d6h -E 75 -- ./weekly.sh  # Tuesdays`,
		Args:              keyAndCommand,
		ValidArgsFunction: completeCommand,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.read(cmd, args)
			o.stdout = cmd.OutOrStdout()
			o.complaints = &complaints{task: &o.task}
			o.logger = slog.New(o.complaints)
			return o.do(cmd.Context(), cmd.Flags())
		},
	}
	flags := cmd.Flags()
	o.addFlags(cmd)
	o.conflict.addFlags(cmd, exitOK, "the run of this period was already started, and has not failed")
	o.output.addFlag(cmd)
	flags.Lookup("output").Usage = "table or json: how to print the run that was already started"
	flags.VarPF((*span)(&o.every), "every", "", "the period, such as 1d, 1w, 12h or 15m").DefValue = "0" // which the help leaves out
	flags.VarPF((*span)(&o.offset), "offset", "", "how much later than at a multiple of --every a period begins").DefValue = "0"
	flags.StringVar(&o.zone, "zone", "", "time `zone` in which days begin, such as Europe/Berlin (default UTC)")
	choiceVar(cmd, &o.first, "first", "", "period", "what a key begins with of which no run is recorded: the period that is under way (now), or the next one", once.FirstNow, once.FirstNext)
	flags.BoolVar(&o.retry, "retry", false, "start the command again in the same period if it failed or its machine died")
	flags.Lookup("ttl").Usage = "with --retry: how long after a crash another machine can start the command again"
	return cmd
}

// span is the value of a flag that takes a duration of days or weeks, or any that seconds takes.
type span time.Duration

var errNotASpan = errors.New("use a duration such as 1d, 1w, 1d12h, 90s, or 90 for seconds")

// longSpan is one with days or weeks.
var longSpan = regexp.MustCompile(`^(?:([0-9]{1,4})w)?(?:([0-9]{1,4})d)?(.*)$`)

func (s *span) String() string { return inDays(time.Duration(*s)) }
func (s *span) Type() string   { return "duration" }

func (s *span) Set(text string) error {
	parts := longSpan.FindStringSubmatch(text)
	var rest seconds
	if parts == nil || text == "" || parts[3] != "" && rest.Set(parts[3]) != nil || rest < 0 && parts[3] != text {
		return errNotASpan
	}
	weeks, _ := strconv.Atoi("0" + parts[1]) // at most 4 digits
	days, _ := strconv.Atoi("0" + parts[2])
	whole := time.Duration(7*weeks+days) * 24 * time.Hour
	if time.Duration(rest) > math.MaxInt64-whole {
		return errNotASpan
	}
	*s = span(whole + time.Duration(rest))
	return nil
}

// inDays writes a duration as span reads it.
func inDays(d time.Duration) string {
	const day = 24 * time.Hour
	if d < day || d%day != 0 {
		return readable.Exact(d)
	}
	return fmt.Sprintf("%dd", d/day)
}

// check says what is wrong with the flags, and returns what a Runner is made with.
func (o *onceTask) check(flags *pflag.FlagSet) (*once.Config, error) {
	if err := refuseEmpty(flags, "UTC", "zone"); err != nil {
		return nil, err
	}
	if err := o.conflict.check(); err != nil {
		return nil, err
	}
	const least, most = time.Millisecond, 3650 * 24 * time.Hour // as once.New has it
	switch {
	case !flags.Changed("every"):
		return nil, errors.New("--every is missing; name the period, such as --every 1d")
	case o.every < least || o.every > most:
		return nil, fmt.Errorf("--every is %s, it must be between %s and %s", inDays(o.every), inDays(least), inDays(most))
	case o.offset < 0 || o.offset >= o.every:
		return nil, fmt.Errorf("--offset is %s, it must be at least 0 and less than --every, %s", inDays(o.offset), inDays(o.every))
	case o.zone != "" && o.every%(24*time.Hour) != 0:
		return nil, fmt.Errorf("--zone is for periods of whole days, and --every is %s; leave it out", inDays(o.every))
	case !o.retry && (flags.Changed("ttl") || flags.Changed("grace")):
		return nil, errors.New("--ttl and --grace are for the lease of --retry; leave them out, or add --retry")
	}
	cfg := &once.Config{Offset: o.offset, First: o.first, Schema: o.target.schema, Retry: o.retry, Logger: o.logger}
	if o.retry {
		if err := o.checkTimes(flags); err != nil {
			return nil, err
		}
		cfg.TTL = o.ttl
	}
	if o.zone != "" {
		var err error
		if cfg.Location, err = time.LoadLocation(o.zone); err != nil || o.zone == "Local" {
			return nil, fmt.Errorf("--zone %q is no time zone; use a name such as Europe/Berlin", o.zone)
		}
	}
	// What else may be wrong is so in memory, too.
	now := *cfg
	now.First = once.FirstNow
	memory, err := once.NewMemory(o.every, &now)
	if err != nil {
		return nil, err
	}
	_, err = memory.Do(context.Background(), o.key, func(_ context.Context, run once.Run) error {
		o.slot = run.Slot
		return nil
	})
	return cfg, err
}

// do runs the command, if it is due.
func (o *onceTask) do(ctx context.Context, flags *pflag.FlagSet) error {
	cfg, err := o.check(flags)
	if err != nil {
		return usageError{err}
	}
	return o.withPool(ctx, func(pool *pgxpool.Pool, signals chan os.Signal) error {
		runner, err := once.New(pool, o.every, cfg)
		if err != nil {
			return usageError{err}
		}
		defer closeInTime(runner)
		return o.conduct(ctx, signals, func(ctx context.Context, under func(tenure) error) error {
			var result error
			ran, err := runner.Do(ctx, o.key, func(_ context.Context, run once.Run) error {
				if other := o.complaints.other; other != nil {
					o.say("another program starts %s once in %s, and this one once in %s; give both the same --every, --offset and --zone, or different keys", shown(o.key), scheduled(*other), scheduled(o.schedule()))
				}
				result = under(tenure{lock: run.Lock, env: runEnvironment(run)})
				return recorded(result)
			})
			return o.result(ctx, pool, ran, result, err)
		})
	})
}

// runEnvironment is what a command learns of its run.
func runEnvironment(run once.Run) []string {
	env := []string{"PGXLOCK_KEY=" + run.Key}
	if run.Lock != nil {
		env = lockEnvironment(run.Lock)
	}
	return append(env, "PGXLOCK_SLOT="+run.Slot.Format(time.RFC3339Nano), fmt.Sprint("PGXLOCK_ATTEMPT=", run.Attempt))
}

// recorded is what the table says of how a command ended.
func recorded(result error) error {
	if _, told := errors.AsType[endedCommand](result); told {
		return errors.New("the command was ended, because the lease was lost or could not be renewed")
	}
	if end, ok := errors.AsType[commandEnd](result); ok {
		return errors.New(end.how())
	}
	return result
}

// result returns with which error once ends: err is that of Do, and result how the command ended.
func (o *onceTask) result(ctx context.Context, pool *pgxpool.Pool, ran bool, result, err error) error {
	notRecorded, _ := errors.AsType[*pgxlock.Error](err) // what else there is in err is what was recorded
	switch {
	case ran && result != nil && notRecorded != nil:
		o.say("%s", describe(o.target.flags, notRecorded))
		return result
	case ran && notRecorded != nil:
		return notRecorded
	case ran:
		return result
	case err != nil:
		return err
	}
	return o.already(ctx, pool)
}

// already says how the run stands that was started before, and returns with which error once ends.
func (o *onceTask) already(ctx context.Context, pool *pgxpool.Pool) error {
	run, err := o.started(ctx, pool)
	if err != nil {
		return err
	}
	code := o.conflict.code
	if run.State == once.StateFailed && !run.Retry {
		code = exitRunFailed
	}
	switch {
	case o.output == formatJSON:
		if err := printJSON(o.stdout, viewRun(run)); err != nil {
			return err
		}
	case !o.conflict.quiet:
		o.say("%s %s", shown(o.key), o.standing(run))
	}
	if code == exitOK {
		return nil
	}
	return outcome{code, errSilent}
}

// started returns the run because of which no other one is started: that of our period, or one that another program has started
// with the same length of periods, whose beginning was changed.
func (o *onceTask) started(ctx context.Context, pool *pgxpool.Pool) (once.Record, error) {
	run := once.Record{Key: o.key, State: once.StateRunning, Retry: true, Schedule: o.schedule()} // if it was forgotten since
	for _, most := range []int{1, maxRuns} {                                                      // mostly it is the latest
		list, err := once.List(ctx, pool, &once.ListConfig{Key: o.key, Limit: most, Schema: o.target.schema})
		if err != nil {
			return run, err
		}
		if i := slices.IndexFunc(list, func(r once.Record) bool { return r.Slot.Equal(o.slot) || r.Schedule.Period == o.every }); i >= 0 {
			return list[i], nil
		}
		if len(list) > 0 {
			run = list[0]
		}
	}
	return run, nil
}

// schedule is what the flags say.
func (o *onceTask) schedule() once.Schedule {
	return once.Schedule{Period: o.every, Offset: o.offset, Location: cmp.Or(o.zone, time.UTC.String())}
}

// scheduled writes a schedule, in as few words as it takes.
func scheduled(s once.Schedule) string {
	if s.Period == 0 {
		return "each tick of a schedule"
	}
	text := inDays(s.Period)
	if s.Offset > 0 {
		text += ", offset " + inDays(s.Offset)
	}
	if s.Location != time.UTC.String() {
		text += ", " + printable(s.Location)
	}
	return text
}

// standing is what is known of a run, for people.
func (o *onceTask) standing(run once.Record) string {
	if run.State == once.StateSkipped {
		return fmt.Sprintf("begins with the next period of %s, by --first next", inDays(o.every))
	}
	text := "was already started in this period of " + scheduled(o.schedule())
	if run.Schedule != o.schedule() {
		text += ", by a program that starts it once in " + scheduled(run.Schedule)
	}
	forget := "pgxlock runs forget " + shellQuote(o.key)
	switch {
	case run.State == once.StateSucceeded:
		return text + ", and has succeeded"
	case run.State == once.StateFailed && !run.Retry:
		return text + ", and has failed: " + printable(run.Error) + "; it starts again only after " + forget
	case run.State == once.StateFailed:
		return text + ", and has failed: " + printable(run.Error)
	case run.State == once.StateAbandoned:
		return text + ", and its process has died"
	case !run.Retry:
		return text + ", and has not ended; if its process has died, " + forget + " --force lets it be started again"
	}
	return text + ", and has not ended"
}

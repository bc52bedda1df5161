package main

import (
	"errors"
	"math"
	"strconv"
	"time"

	"github.com/spf13/pflag"

	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
)

// seconds is the value of a flag that takes a duration: with units, as Go writes one, or as a
// bare number of seconds, as flock(1) and sleep(1) do.
type seconds time.Duration

// errNotADuration says what a duration looks like.
var errNotADuration = errors.New("use a duration such as 90s, 1h30m, or 90 for seconds")

func (s *seconds) String() string { return readable.Exact(time.Duration(*s)) }
func (s *seconds) Type() string   { return "duration" }

func (s *seconds) Set(text string) error {
	if number, err := strconv.ParseFloat(text, 64); err == nil {
		nanoseconds := number * float64(time.Second)
		if math.IsNaN(number) || math.Abs(nanoseconds) >= math.MaxInt64 {
			return errNotADuration
		}
		*s = seconds(math.Round(nanoseconds))
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return errNotADuration
	}
	*s = seconds(d)
	return nil
}

// durationVar adds a flag for a duration. short is its letter, "" for none.
func durationVar(flags *pflag.FlagSet, d *time.Duration, name, short string, value time.Duration, usage string) {
	*d = value
	flag := flags.VarPF((*seconds)(d), name, short, usage)
	if value == 0 {
		flag.DefValue = "0" // which the help leaves out
	}
}

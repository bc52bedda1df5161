package judge

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// script returns the events of a text with a line for each: when in seconds, of which process and
// request, what, and fields. An ask names a kind and a key too:
//
//	1.5 p1#7 ask lease a shared
//	2 p1#7 granted token=3 deadline=9
func script(t *testing.T, text string) []history.Event {
	t.Helper()
	var events []history.Event
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		e, err := event(words)
		if err != nil {
			t.Fatalf("%s: %v", strings.TrimSpace(line), err)
		}
		events = append(events, e)
	}
	slices.SortStableFunc(events, func(a, b history.Event) int { return cmp.Compare(a.Mono, b.Mono) })
	return events
}

func event(words []string) (e history.Event, err error) {
	process, op, _ := strings.Cut(words[1], "#")
	e.Process, e.What = process, history.What(words[2])
	e.Mono, err = seconds(words[0])
	if err != nil {
		return e, err
	}
	e.Op, _ = strconv.ParseInt(op, 10, 64)
	e.Caller = int(e.Op)
	fields := words[3:]
	if e.What == history.Ask {
		e.Kind, e.Key, fields = history.Kind(fields[0]), fields[1], fields[2:]
	}
	for _, field := range fields {
		name, value, _ := strings.Cut(field, "=")
		n, _ := strconv.ParseInt(value, 10, 64)
		switch name {
		case "shared":
			e.Shared = true
		case "try":
			e.Try = true
		case "token":
			e.Token = n
		case "holder":
			e.Holder = value
		case "key":
			e.Key = value
		case "set":
			e.Set = n
		case "ttl":
			e.TTL = time.Duration(n) * time.Second
		case "write":
			e.Write = n
		case "position":
			e.Position = n
		case "limit":
			e.Limit = int(n)
		case "n":
			e.N = int(n)
		case "rate":
			e.Rate, err = strconv.ParseFloat(value, 64)
		case "deadline":
			e.Deadline, err = seconds(value)
		case "began":
			e.Began, err = seconds(value)
		case "err":
			e.Err = value
		case "fault":
			e.Fault = history.Fault(value)
		case "target":
			e.Target = value
		case "period":
			e.Period = value
		default:
			return e, fmt.Errorf("unknown field %q", name)
		}
		if err != nil {
			return e, err
		}
	}
	return e, nil
}

func seconds(text string) (int64, error) {
	n, err := strconv.ParseFloat(text, 64)
	return int64(n * float64(time.Second)), err
}

package judge

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// A Report is what became of a run, or of several.
type Report struct {
	Verdicts []Verdict

	Runs      int
	Took      time.Duration // from the first event to the last
	Processes int           // that asked for something
	Asked     int
	Granted   map[history.Kind]int
	Open      int // requests without an answer
	Lost      int // losses that were noticed
	Writes    int // fenced transactions that are committed
	Faults    map[history.Fault]int
}

// Add adds another report to this one, which may be the zero Report.
func (r *Report) Add(o *Report) {
	if r.Runs == 0 {
		r.Granted, r.Faults = map[history.Kind]int{}, map[history.Fault]int{}
		for _, v := range o.Verdicts {
			r.Verdicts = append(r.Verdicts, Verdict{Rule: v.Rule})
		}
	}
	for i, v := range o.Verdicts {
		sum := &r.Verdicts[i]
		sum.Excused += v.Excused
		sum.Checked += v.Checked
		sum.Violations = append(sum.Violations, v.Violations...)
		sum.Unknown = append(sum.Unknown, v.Unknown...)
	}
	r.Runs += o.Runs
	r.Took += o.Took
	r.Processes += o.Processes
	r.Asked += o.Asked
	r.Open += o.Open
	r.Lost += o.Lost
	r.Writes += o.Writes
	for kind, n := range o.Granted {
		r.Granted[kind] += n
	}
	for fault, n := range o.Faults {
		r.Faults[fault] += n
	}
}

// Folder judges the history in a folder, and in each folder below it, and prints the report of all
// together. It names the folders of what is violated, and leaves pictures there.
func Folder(dir string, w io.Writer) (*Report, error) {
	all := &Report{}
	var named strings.Builder
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return err
		}
		events, err := history.Read(path)
		if errors.Is(err, history.ErrNone) {
			return nil
		}
		if err != nil {
			return err
		}
		report, err := Judge(events, path)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if report.Violations()+report.Unknown() > 0 {
			fmt.Fprintf(&named, "%s: %d violations, %d unknown\n", path, report.Violations(), report.Unknown())
		}
		all.Add(report)
		return nil
	})
	if err == nil && all.Runs == 0 {
		err = fmt.Errorf("no history in %s or below it", dir)
	}
	if err == nil {
		_, err = io.WriteString(w, named.String())
	}
	if err != nil {
		return nil, err
	}
	return all, all.Print(w)
}

func newReport(events []history.Event, r *run) *Report {
	report := &Report{Runs: 1, Granted: map[history.Kind]int{}, Faults: map[history.Fault]int{}}
	if len(events) > 0 {
		report.Took = time.Duration(events[len(events)-1].Mono - events[0].Mono)
	}
	processes := map[string]bool{}
	for _, q := range r.requests {
		processes[q.ask.Process] = true
		report.Asked++
		switch {
		case q.granted():
			report.Granted[q.ask.Kind]++
		case q.answer == "" || q.answer == history.Unknown:
			report.Open++
		}
		if q.lost != never {
			report.Lost++
		}
	}
	report.Processes = len(processes)
	for _, w := range r.writes {
		if w.rows > 0 || w.answer == history.Wrote {
			report.Writes++
		}
	}
	for _, f := range r.faults {
		report.Faults[f.Fault]++
	}
	return report
}

// Violations returns how much was not as promised, Unknown what could not be decided, and Checked
// how much was judged.
func (r *Report) Violations() (n int) {
	for _, v := range r.Verdicts {
		n += len(v.Violations)
	}
	return n
}

// Unknown returns how many parts could not be decided.
func (r *Report) Unknown() (n int) {
	for _, v := range r.Verdicts {
		n += len(v.Unknown)
	}
	return n
}

// Checked returns how many events and operations were judged.
func (r *Report) Checked() (n int) {
	for _, v := range r.Verdicts {
		n += v.Checked
	}
	return n
}

// shown is how many violations of a rule are printed.
const shown = 10

// Print writes the verdict of each rule, the counts, and the row of docs/proof.md.
func (r *Report) Print(w io.Writer) error {
	var text strings.Builder
	for _, v := range r.Verdicts {
		verdict := "kept"
		switch {
		case len(v.Violations) > 0:
			verdict = fmt.Sprintf("VIOLATED %d times", len(v.Violations))
		case len(v.Unknown) > 0:
			verdict = "UNKNOWN"
		case v.Checked == 0:
			verdict = "nothing to judge"
		}
		if v.Excused > 0 {
			verdict += fmt.Sprintf(", not judged in %d of %d", v.Excused, r.Runs)
		}
		fmt.Fprintf(&text, "%-13s %9d checked  %s: %s\n", v.Rule.Name, v.Checked, v.Rule.Says, verdict)
		for _, violation := range slices.Concat(v.Violations[:min(len(v.Violations), shown)], v.Unknown[:min(len(v.Unknown), shown)]) {
			fmt.Fprintf(&text, "    %s\n", violation)
		}
	}
	fmt.Fprintf(&text, "%d runs: %d requests of %d processes in %v: granted %s; %d open, %d lost, %d fenced writes; faults %s\n",
		r.Runs, r.Asked, r.Processes, r.Took.Round(time.Second), counts(r.Granted), r.Open, r.Lost, r.Writes, counts(r.Faults))
	fmt.Fprintf(&text, "%s\n", r.Row())
	_, err := io.WriteString(w, text.String())
	return err
}

// Header and Row are the table of docs/proof.md.
const Header = "| runs | time | processes | requests | granted | open | lost | fenced writes | faults | checks | unknown | violations |\n" +
	"|--:|--:|--:|--:|---|--:|--:|--:|---|--:|--:|--:|"

// Row returns the run's row of the table under Header.
func (r *Report) Row() string {
	return fmt.Sprintf("| %d | %v | %d | %d | %s | %d | %d | %d | %s | %d | %d | %d |", r.Runs, r.Took.Round(time.Second), r.Processes, r.Asked,
		counts(r.Granted), r.Open, r.Lost, r.Writes, counts(r.Faults), r.Checked(), r.Unknown(), r.Violations())
}

// counts returns how often each name was counted, the most frequent first.
func counts[K ~string](n map[K]int) string {
	names := slices.SortedFunc(maps.Keys(n), func(a, b K) int { return cmp.Or(cmp.Compare(n[b], n[a]), cmp.Compare(a, b)) })
	var all []string
	for _, name := range names {
		all = append(all, fmt.Sprintf("%s %d", name, n[name]))
	}
	return cmp.Or(strings.Join(all, ", "), "none")
}

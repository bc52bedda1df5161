package judge

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// record writes the events of a script as a run in a folder.
func record(t *testing.T, dir, text string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	w, err := history.Create(dir, "all")
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for _, e := range script(t, text) {
		w.Write(e)
	}
}

func TestFolderOfRunsIsJudgedAsOne(t *testing.T) {
	dir := t.TempDir()
	record(t, filepath.Join(dir, "1"), takenOver)
	record(t, filepath.Join(dir, "2"), "1 c#1 fault fault=clock-jump\n"+twoPermits)
	var text strings.Builder
	report, err := Folder(dir, &text)
	if err != nil || report.Violations()+report.Unknown() > 0 {
		t.Fatalf("error %v\n%s", err, text.String())
	}
	for _, want := range []string{"I4                    5 checked  no late holder writes: kept\n", ", not judged in 1 of 2\n", "2 runs: 5 requests of 5 processes", "granted permit 3, lease 2;", "faults clock-jump 1\n", "| 2 | 40s | 5 | 5 |"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	if row := strings.Count(report.Row(), "|"); strings.Count(Header, "|") != 2*row {
		t.Errorf("the row has %d columns\n%s", row, Header)
	}

	broken := filepath.Join(dir, "3")
	record(t, broken, strings.Replace(inTurn, "7 p2#1 granted", "4.5 p2#1 granted", 1))
	text.Reset()
	if report, err = Folder(dir, &text); err != nil || report.Violations() != 3 || !strings.Contains(text.String(), broken+": 3 violations, 0 unknown") {
		t.Errorf("error %v\n%s", err, text.String())
	}
	if pictures, _ := filepath.Glob(filepath.Join(broken, "*.html")); len(pictures) != 1 {
		t.Errorf("pictures %v", pictures)
	}
	if _, err := Folder(t.TempDir(), &text); err == nil {
		t.Error("a folder without a history was judged")
	}
}

func TestPartThatPorcupineCannotDecideIsUnknown(t *testing.T) {
	hard := part{"a hard one", porcupine.Model{
		Init: func() any { return 0 },
		StepContext: func(ctx context.Context, _, _, _ any) (bool, any) {
			<-ctx.Done()
			return true, 0
		},
	}, []porcupine.Operation{{Input: step{}, Call: 1, Return: 2}}}
	report := judge(t, inTurn, "")
	check(&run{}, &report.Verdicts[0], hard, time.Millisecond)
	var text strings.Builder
	if err := report.Print(&text); err != nil {
		t.Fatal(err)
	}
	if report.Unknown() != 1 || report.Violations() != 0 || !strings.Contains(text.String(), "by porcupine: UNKNOWN\n    a hard one: no answer in 1ms\n") {
		t.Errorf("it is not said that one part is unknown:\n%s", text.String())
	}
}

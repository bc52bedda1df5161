package history

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// suffix ends the names of a history's files.
const suffix = ".jsonl"

// At returns what Now will be at t, or a moment before it: of a deadline it is a safe bound.
func At(t time.Time) int64 {
	now := Now()
	return now + int64(time.Until(t))
}

// A Writer writes the events of a process. Its methods are safe for concurrent use.
type Writer struct {
	process string

	mu   sync.Mutex
	file *os.File
	seq  int64
}

// Create makes the file of a process in the folder of a run. It fails if that exists: no two
// processes of a run have one name.
func Create(dir, process string) (*Writer, error) {
	file, err := os.OpenFile(filepath.Join(dir, process+suffix), os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("history: %w", err)
	}
	return &Writer{process: process, file: file}, nil
}

// Write appends an event, and returns when the kernel has it: a process that is killed loses at
// most the line that it is writing. It sets Seq and Wall, and Process and Mono where they are
// zero. It panics if it cannot write, because a history with a hole proves nothing.
func (w *Writer) Write(e Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seq++
	e.Seq, e.Wall = w.seq, time.Now().Round(0)
	e.Process = cmp.Or(e.Process, w.process)
	e.Mono = cmp.Or(e.Mono, Now())
	line, err := json.Marshal(e)
	if err == nil {
		_, err = w.file.Write(append(line, '\n'))
	}
	if err != nil {
		panic(fmt.Errorf("history of %s: %w", w.process, err))
	}
}

// Close closes the file. No Write may follow.
func (w *Writer) Close() error { return w.file.Close() }

// ErrNone says that a folder has no history.
var ErrNone = errors.New("history: no file *" + suffix)

// Read returns the events of all files in the folder of a run, in the order of Mono. A last line
// without its end is left out: its writer was killed. A missing line is an error, and so is a
// folder without files: ErrNone.
func Read(dir string) ([]Event, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*"+suffix))
	if err != nil {
		return nil, fmt.Errorf("history: %w", err)
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%w in %s", ErrNone, dir)
	}
	var all []Event
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("history: %w", err)
		}
		seq := int64(0)
		for line := range bytes.Lines(text) {
			if line[len(line)-1] != '\n' {
				break
			}
			var e Event
			if err := json.Unmarshal(line, &e); err != nil {
				return nil, fmt.Errorf("history: %s, line %d: %w", name, seq+1, err)
			}
			if seq++; e.Seq != seq {
				return nil, fmt.Errorf("history: %s, line %d: seq is %d", name, seq, e.Seq)
			}
			all = append(all, e)
		}
	}
	slices.SortStableFunc(all, func(a, b Event) int { return cmp.Compare(a.Mono, b.Mono) })
	return all, nil
}

package pgxlockprom_test

import (
	"testing"

	"github.com/pgxlock/pgxlock/internal/plaintest"
)

func TestMain(m *testing.M) { plaintest.Main(m) }

# Waits in turn for a lease, with Ruby's pg.
require "pg"
require "securerandom"
require "socket"

name = "invoice:42"
holder = "#{Socket.gethostname}:#{Process.pid}:#{SecureRandom.uuid}"
$conn = PG.connect # commits each statement outside of conn.transaction

def acquire_in_turn(name, holder, ticket = nil)
  call = "SELECT acquired, fencing_token, ticket, ask_again_ms FROM acquire_in_turn($1, $2, 60, $3)"
  loop do
    acquired, token, ticket, pause = $conn.exec_params(call, [name, holder, ticket]).values.first
    return token if acquired == "t"
    sleep pause.to_f / 1000
  end
end

token = acquire_in_turn(name, holder)
puts "acquired with token #{token}"
$conn.exec_params("SELECT release_lock($1, $2)", [name, holder])
$conn.exec_params("SELECT wake_lock_waiter($1)", [name])

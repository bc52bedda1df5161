# Waits in turn for a lease, with ActiveRecord, as code of a Rails request: under the query cache.
require "logger"
require "active_record"
require "securerandom"
require "socket"

ActiveRecord::Base.establish_connection(adapter: "postgresql") # to the server of the PG* variables
ActiveRecord::Base.connection # cache does nothing before the first one

# In uncached each call reaches the server.
def pgxlock(sql, *values)
  ActiveRecord::Base.uncached do
    ActiveRecord::Base.connection.select_rows(ActiveRecord::Base.sanitize_sql([sql, *values])).first
  end
end

def acquire_in_turn(name, holder, ticket = nil)
  call = "SELECT acquired, fencing_token, ticket, ask_again_ms FROM acquire_in_turn(?, ?, 60, ?)"
  loop do
    acquired, token, ticket, pause = pgxlock(call, name, holder, ticket)
    return token if acquired
    sleep pause / 1000.0
  end
end

name = "invoice:42"
holder = "#{Socket.gethostname}:#{Process.pid}:#{SecureRandom.uuid}"
ActiveRecord::Base.cache do
  token = acquire_in_turn(name, holder)
  puts "acquired with token #{token}"
  pgxlock("SELECT release_lock(?, ?)", name, holder)
  pgxlock("SELECT wake_lock_waiter(?)", name)
end

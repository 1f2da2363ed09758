freeze

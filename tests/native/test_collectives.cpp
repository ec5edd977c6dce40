// The collectives between threads, checked against exact integers.
#include <string>
#include <vector>

#include "collective_cases.h"

namespace tpkernels::test {
namespace {

using host::Channel;
using host::DType;
using host::Failure;
using host::FailureKind;
using host::ShardLayout;

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kF64};

std::vector<std::size_t> rows_of(int world, std::vector<std::size_t> pattern) {
  std::vector<std::size_t> sizes;
  for (int rank = 0; rank < world; ++rank) {
    sizes.push_back(pattern[static_cast<std::size_t>(rank) % pattern.size()]);
  }
  return sizes;
}

// Every world size, with one-page buffers so that most calls take several chunks.
template <class F>
void on_every_world(F&& body) {
  for (const int world : {1, 2, 3, 4}) {
    Setup setup;
    setup.world = world;
    setup.capacity = 4096;
    on_threads(setup, body);
  }
}

std::shared_ptr<host::Arena> add_segment(Channel& channel,
                                         const std::shared_ptr<host::Arena>& segment) {
  channel.add_segment(1, segment);
  return segment;
}

}  // namespace

TEST_CASE(all_gathers_are_exact, kThreads) {
  on_every_world([](Channel& channel) {
    const int world = channel.world();
    int round = 0;
    for (const DType dtype : kDTypes) {
      for (const std::size_t outer : {1, 3}) {
        for (const std::size_t inner : {1, 7, 33, 300}) {
          for (const auto& pattern : {std::vector<std::size_t>{4}, {3, 0, 5}, {0}, {0, 0, 0, 29}}) {
            Collective call{Op::kAllGather, {outer, inner, rows_of(world, pattern)}, dtype, dtype};
            call.round = ++round;
            run_collective(channel, call);
          }
        }
      }
    }
  });
}

TEST_CASE(reduce_scatters_are_exact, kThreads) {
  on_every_world([](Channel& channel) {
    const int world = channel.world();
    int round = 0;
    for (const DType dtype : kDTypes) {
      for (const std::size_t outer : {1, 3}) {
        for (const std::size_t inner : {1, 7, 300}) {
          for (const auto& pattern : {std::vector<std::size_t>{4}, {3, 0, 5}, {0}, {0, 0, 0, 29}}) {
            Collective call{Op::kReduceScatter, {outer, inner, rows_of(world, pattern)}, dtype};
            call.round = ++round;
            call.out = dtype == DType::kF64 ? dtype : kDTypes[round % 3];
            call.bias = round % 2 == 0;
            call.residual = round % 3 == 0;
            run_collective(channel, call);
          }
        }
      }
    }
  });
}

TEST_CASE(all_reduces_are_exact, kThreads) {
  on_every_world([](Channel& channel) {
    int round = 0;
    // Sizes from one element to many chunks, including those around the one-shot limit.
    const std::size_t edge = host::chunk_limits().one_shot_bytes;
    for (const DType dtype : kDTypes) {
      const std::size_t at = edge / size_of(dtype);
      for (const std::size_t count :
           {std::size_t{0}, std::size_t{1}, std::size_t{63}, at - 1, at, at + 1, 3 * at + 17}) {
        for (const bool in_place : {false, true}) {
          Collective call{Op::kAllReduce, {1, count, {}}, dtype};
          call.round = ++round;
          call.in_place = in_place;
          call.out = in_place || dtype == DType::kF64 ? dtype : kDTypes[round % 3];
          call.bias = round % 3 == 0;
          call.residual = round % 5 == 0;
          run_collective(channel, call);
        }
      }
    }
  });
}

TEST_CASE(symmetric_inputs_are_read_in_place, kThreads) {
  for (const int world : {1, 2, 3}) {
    const auto segment = make_arena(world, kSegmentBytes);
    Setup setup;
    setup.world = world;
    setup.capacity = 4096;
    setup.max_delay_us = 200;
    on_threads(setup, [&](Channel& channel) {
      add_segment(channel, segment);
      int round = 0;
      for (std::uint32_t who = 1; who < 1u << world; ++who) {  // every subset of ranks
        for (const std::size_t outer : {1, 2}) {
          const ShardLayout layout{outer, 33, rows_of(world, {30, 0, 41})};
          for (const Op op : {Op::kAllGather, Op::kReduceScatter, Op::kAllReduce}) {
            Collective call{op, op == Op::kAllReduce ? ShardLayout{1, 9001, {}} : layout};
            call.round = ++round;
            call.symmetric = who;
            run_collective(channel, call, segment);
          }
        }
      }
    });
  }
}

TEST_CASE(a_released_segment_is_an_error_on_all_ranks, kThreads) {
  const auto theirs = make_arena(2, kSegmentBytes);
  on_threads(Setup{}, [&](Channel& channel) {
    auto own = channel.rank() == 0 ? theirs : make_arena(2, kSegmentBytes);
    add_segment(channel, own);
    if (channel.rank() == 1) own.reset();  // rank 0 keeps its segment, rank 1 releases its own
    Collective call{Op::kAllGather, {1, 8, {4, 4}}};
    call.symmetric = 1;
    const Failure failure =
        failure_of(FailureKind::kMismatch, [&] { run_collective(channel, call, own); });
    CHECK(contains(failure.what(), "passes a symmetric tensor that this rank has released"),
          failure.what());
  });
}

// Results larger than the caches use streaming stores.
TEST_CASE(large_results_are_streamed, kThreads) {
  Setup setup;
  setup.capacity = 1 << 20;
  on_threads(setup, [](Channel& channel) {
    const std::size_t half = (4 << 20) / 4 + 7;
    run_collective(channel, {Op::kAllGather, {1, 1, {half, half}}});
    run_collective(channel, {Op::kAllReduce, {1, 2 * half + 3, {}}});
  });
}

TEST_CASE(every_vector_unit_agrees, kThreads) {
  const std::string best = host::vector_unit().name;
  for (const host::VectorUnit* unit : host::available_units()) {
    host::use_unit(unit->name);
    Setup setup;
    setup.world = 3;
    on_threads(setup,
               [](Channel& channel) { run_random_collectives(channel, options().seed + 1, 25); });
  }
  host::use_unit(best);
}

TEST_CASE(random_collectives_under_delays, kThreads) {
  for (const int world : {2, 4}) {
    const auto segment = make_arena(world, kSegmentBytes);
    Setup setup;
    setup.world = world;
    setup.capacity = 8192;
    setup.max_delay_us = 300;
    setup.epoch = 0xfffffff0u;
    on_threads(setup, [&](Channel& channel) {
      add_segment(channel, segment);
      run_random_collectives(channel, options().seed, options().calls, segment);
    });
  }
}

}  // namespace tpkernels::test

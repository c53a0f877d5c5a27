// Counts memory transactions: distinct 128-byte lines that the lanes of one SIMD group touch with one instruction.
//
// Lanes run one after the other between two synchronisations, so accesses are matched afterwards: the n-th time
// that a lane executes a load since the last synchronisation belongs with the n-th time of its neighbours.
#pragma once

#include <cstdint>
#include <vector>

namespace lab {

class Transactions {
public:
    void start_segment() {
        stamp_++;
        used_ = 0;
    }
    void start_lane() { lane_stamp_++; }

    // The number of the access at this instruction by this lane, in one word with the instruction.
    uint64_t occurrence(uintptr_t pc) {
        uint32_t site = find_site(pc);
        Count& c = counts_[site];
        if (c.stamp != lane_stamp_) c = {lane_stamp_, 0};
        return (uint64_t{site & 0xfff} << 52) | (uint64_t{c.n++ & 0xffffff} << 28);
    }
    // True the first time that a line is touched in an occurrence.
    bool touch(uint64_t occurrence, uint64_t line, unsigned slot) {
        uint64_t key = occurrence | (line & 0x3ffffff) | (uint64_t{slot & 3} << 26);
        if (used_ * 2 >= table_.size()) grow();
        return insert(table_, key);
    }

private:
    struct Entry {
        uint64_t key;
        uint64_t stamp;
    };
    struct Count {
        uint64_t stamp;
        uint32_t n;
    };
    static uint64_t mix(uint64_t k) {
        k *= 0x9e3779b97f4a7c15u;
        return k ^ k >> 29;
    }
    bool insert(std::vector<Entry>& table, uint64_t key) {
        uint64_t m = table.size() - 1;
        for (uint64_t i = mix(key) & m;; i = (i + 1) & m) {
            if (table[i].stamp != stamp_) {
                table[i] = {key, stamp_};
                used_++;
                return true;
            }
            if (table[i].key == key) return false;
        }
    }
    void grow() {
        std::vector<Entry> bigger(table_.size() * 2, Entry{0, 0});
        used_ = 0;
        for (Entry& e : table_)
            if (e.stamp == stamp_) insert(bigger, e.key);
        table_.swap(bigger);
    }
    uint32_t find_site(uintptr_t pc) {
        uint64_t m = sites_.size() - 1;
        for (uint64_t i = mix(pc) & m;; i = (i + 1) & m) {
            if (sites_[i].first == pc) return sites_[i].second;
            if (sites_[i].first == 0) {
                auto id = static_cast<uint32_t>(counts_.size());
                sites_[i] = {pc, id};
                counts_.push_back({0, 0});
                if (counts_.size() * 2 >= sites_.size()) more_sites();
                return id;
            }
        }
    }
    void more_sites() {
        std::vector<std::pair<uintptr_t, uint32_t>> bigger(sites_.size() * 2);
        for (auto& s : sites_) {
            if (s.first == 0) continue;
            uint64_t i = mix(s.first) & (bigger.size() - 1);
            while (bigger[i].first) i = (i + 1) & (bigger.size() - 1);
            bigger[i] = s;
        }
        sites_.swap(bigger);
    }

    std::vector<Entry> table_ = std::vector<Entry>(1 << 12, Entry{0, 0});
    std::vector<std::pair<uintptr_t, uint32_t>> sites_ = std::vector<std::pair<uintptr_t, uint32_t>>(1 << 10);
    std::vector<Count> counts_;
    uint64_t stamp_ = 1, lane_stamp_ = 1, used_ = 0;
};

}  // namespace lab

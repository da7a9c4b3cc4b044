//! Tests runs that take slots at the same time, in many thread orders.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures::poll;
use krypton_runtime::sync::schedule::{Scene, block_on, check};
use krypton_runtime::sync::step;

use super::*;

const SCHEDULES: u64 = 1_000;

fn slots(total: usize, per_member: usize) -> Slots {
    Slots::new(Limits { total, per_member })
}

/// Takes a slot, and frees it after a step.
fn run(slots: &Slots, running: &AtomicUsize, member: &str, priority: Priority) {
    let slot = block_on(slots.take(member, priority));
    let others = running.fetch_add(1, Ordering::Relaxed);
    step(|| assert!(others < slots.0.limits.total, "{others} others run"));
    running.fetch_sub(1, Ordering::Relaxed);
    drop(slot);
}

/// Checks that no run is left and that the next one gets a slot.
fn assert_free(slots: &Slots) {
    let load = slots.load();
    assert!(load.running.is_empty() && load.waiting.is_empty());
    assert_eq!(slots.0.state.lock().total, 0);
    assert_eq!(slots.0.in_use.get(), 0);
}

#[test]
fn each_run_gets_slot_in_every_schedule() {
    for (total, per_member) in [(1, 1), (2, 1)] {
        check(SCHEDULES, |scene: &mut Scene| {
            let slots = slots(total, per_member);
            let running = Arc::new(AtomicUsize::new(0));
            for (name, member, priority) in [
                ("install", "a", Priority::High),
                ("upgrade", "a", Priority::Low),
                ("another", "b", Priority::Low),
            ] {
                let (slots, running) = (slots.clone(), Arc::clone(&running));
                scene.thread(name, move || {
                    run(&slots, &running, member, priority);
                    run(&slots, &running, member, Priority::Low);
                });
            }
            scene.end(move || assert_free(&slots));
        });
    }
}

#[test]
fn cancelled_run_keeps_no_slot_in_any_schedule() {
    check(SCHEDULES, |scene: &mut Scene| {
        let slots = slots(1, 1);
        let running = Arc::new(AtomicUsize::new(0));
        let cancelled = slots.clone();
        scene.task("cancelled", async move {
            let mut take = Box::pin(cancelled.take("a", Priority::High));
            let taken = poll!(take.as_mut());
            drop(take);
            drop(taken);
        });
        for (name, member) in [("first", "a"), ("second", "b")] {
            let (slots, running) = (slots.clone(), Arc::clone(&running));
            scene.thread(name, move || run(&slots, &running, member, Priority::Low));
        }
        let dump = slots.clone();
        scene.thread("dump", move || assert!(dump.load().running.len() <= 1));
        scene.end(move || assert_free(&slots));
    });
}

//! KryptonDeployments: which member each is for, what is ordered of it there, and what home's object says.
//! The work is done by the member's reconciler (design §2; operator reference 1.6).

mod aim;
mod decision;
mod deeds;
mod keep;
mod writes;

pub use keep::{Keep, run};

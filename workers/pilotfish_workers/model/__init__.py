"""Models behind one interface: paged KV, packed passes, text.

block_pool       which KV blocks are free (no torch)
interface        what an engine needs of a model (no torch)
runner           a transformers model behind that interface
loading, gate    from a folder to a model that is served exactly, or a reason why not
pass_plan        layout of one packed pass, built once and used by every layer
paged_attention  the hook into transformers' attention
text             tokenizer, chat template, incremental detokenising
"""
